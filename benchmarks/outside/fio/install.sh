#!/bin/sh
# sh install.sh VENV: fio of the distribution (needs root where it is missing), and packer.
set -e
root=$(cd "$(dirname "$0")/../../.." && pwd)
install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check -c "$root/constraints.txt" "$@"; }
venv=$1
command -v fio > /dev/null || apt-get install -qqy fio > /dev/null
install "${PACKER:-$root}"
