#!/bin/sh
# sh install.sh VENV: webdataset, and in VENV/webdataset 0.1.103, the last release with a bench.py that starts.
set -e
root=$(cd "$(dirname "$0")/../../.." && pwd)
install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check -c "$root/constraints.txt" "$@"; }
venv=$1
install "${PACKER:-$root}" webdataset==1.0.2
install --no-deps --target "$venv/webdataset" webdataset==0.1.103
