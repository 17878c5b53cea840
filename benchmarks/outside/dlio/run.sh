#!/bin/sh
# sh run.sh VENV IMAGES: makes the data from the JPEGs of IMAGES once (2 GB, in VENV/data or WORK), then runs each
# workload with DLIO's loader and with packer's. SAMPLES=N sets the number of samples (100,000).
set -e
here=$(dirname "$0")
work=${WORK:-$1/data}
samples=${SAMPLES:-100000}
if [ ! -e "$work/arrays/set" ]; then
  [ -n "$2" ] || { echo 'dlio: give a folder of JPEGs' >&2; exit 2; }
  "$1/bin/python" "$here/prepare.py" "$2" "$work" --samples "$samples"
fi
run() { printf '\n%s\n' "$*"; "$venv/bin/python" "$here/run.py" --samples "$samples" "$@"; }
venv=$1
run "$work/retinanet" --mlperf
run "$work/retinanet"
run "$work/retinanet" --decode
run "$work/resnet50" --decode
run "$work/arrays"
