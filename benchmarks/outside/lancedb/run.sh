#!/bin/sh
# sh run.sh VENV: the benchmark with LanceDB, then with packer.
exec "$1/bin/python" "$(dirname "$0")/ours.py"
