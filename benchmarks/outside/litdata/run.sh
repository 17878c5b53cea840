#!/bin/sh
# sh run.sh VENV [IMAGES]: the benchmark, then ours in it.
exec "$1/bin/python" "$(dirname "$0")/ours.py" "${2:?IMAGES: a folder for each class, with JPEGs}"
