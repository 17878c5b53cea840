#!/bin/sh
# sh run.sh VENV: the unchanged script, then packer's rows. PICTURE: a file (default: the script's picture); RUNS: runs of
# each decoder (50).
here=$(cd "$(dirname "$0")" && pwd)
cd "$1/suite/benchmarks/decoders" || exit 2
"$1/bin/python" benchmark_image_decoders.py --devices cpu --num-exp "${RUNS:-50}" ${PICTURE:+--image "$PICTURE"} || exit 1
PYTHONPATH=. exec "$1/bin/python" "$here/rows.py"
