#!/bin/sh
# sh run.sh VENV: the benchmark, then ours in it.
exec "$1/bin/python" "$(dirname "$0")/ours.py"
