#!/bin/sh
# sh install.sh VENV: array_record, and the text of its performance guide (google/array_record, docs/performance.md).
set -e
root=$(cd "$(dirname "$0")/../../.." && pwd)
install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check -c "$root/constraints.txt" "$@"; }
venv=$1
install "${PACKER:-$root}" array-record==0.8.6 lorem-text==3.0
