#!/bin/sh
# sh install.sh VENV: webdataset, and in VENV/webdataset 0.1.103, the last release with a bench.py that starts.
. "$(dirname "$0")/../get.sh"
packages "${PACKER:-$root}" webdataset==1.0.2
packages --no-deps --target "$venv/webdataset" webdataset==0.1.103
