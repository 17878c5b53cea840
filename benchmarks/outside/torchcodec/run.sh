#!/bin/sh
# run.sh VENV: the script as it is, with its own picture (RUNS: of a decoder, default 50), and then our rows
here=$(cd "$(dirname "$0")" && pwd)
cd "$1/suite/benchmarks/decoders" || exit 2
"$1/bin/python" benchmark_image_decoders.py --devices cpu --num-exp "${RUNS:-50}" || exit 1
PYTHONPATH=. exec "$1/bin/python" "$here/rows.py"
