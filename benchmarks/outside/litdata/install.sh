#!/bin/sh
# sh install.sh VENV [SOURCE]: LitData, and its benchmarks in VENV/litdata.
set -e
root=$(cd "$(dirname "$0")/../../.." && pwd)
install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check -c "$root/constraints.txt" "$@"; }
venv=$1
sh "$root/benchmarks/outside/fetch.sh" "$venv" litdata "${2:-https://github.com/Lightning-AI/litData}" \
  8805bae05cfdab5644ea40e16df802e95a1914f1 benchmarks/litdata
install torch==2.13.0 litdata==0.2.76 lightning requests
install --no-deps torchvision==0.28.0
