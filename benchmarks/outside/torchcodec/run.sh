#!/bin/sh
# run.sh VENV [IMAGES]: the script as it is, with one of the images (the largest file) or its own, and then our rows
here=$(cd "$(dirname "$0")" && pwd)
if [ -n "${2:-}" ]; then set -- "$1" --image "$(find "$2" -type f -size +100k | sort | head -1)"; fi
venv=$1
shift
cd "$venv/suite/benchmarks/decoders" || exit 2
"$venv/bin/python" benchmark_image_decoders.py --devices cpu --num-exp "${RUNS:-50}" "$@" || exit 1
PYTHONPATH=. exec "$venv/bin/python" "$here/rows.py" "$@"
