#!/bin/sh
# sh install.sh VENV [SOURCE]: LitData, and its benchmarks in VENV/litdata.
. "$(dirname "$0")/../get.sh"
packages "${PACKER:-$root}"
files litdata https://github.com/Lightning-AI/litData \
  8805bae05cfdab5644ea40e16df802e95a1914f1 benchmarks/litdata
packages torch==2.13.0 litdata==0.2.76 lightning requests
packages --no-deps torchvision==0.28.0
