#!/bin/sh
# sh install.sh VENV [SOURCE [SOURCE]]: DLIO of argonne-lcf, and the DLIO that MLPerf Storage v3.0 uses, in VENV/mlperf.
set -e
venv=$1
root=$(cd "$(dirname "$0")/../../.." && pwd)
argonne=${2:-https://github.com/argonne-lcf/dlio_benchmark}@e1919d7b6ccffbe15143cd616517da9e5d7b26a7
mlperf=${3:-https://github.com/mlcommons/DLIO_local_changes}@f6796ed281e39ccc83a450e2b1f21b9c909d8fd0
install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check -c "$root/constraints.txt" "$@"; }
install torch==2.13.0
install "${PACKER:-$root}"
# Both require TensorFlow and DALI, which PyTorch's workloads do not import; the second also requires Python 3.12.
install mpi4py mpich hydra-core omegaconf pandas psutil pyyaml pydftracer setuptools wheel
install --no-deps "git+$argonne"
install --no-deps --ignore-requires-python --target "$venv/mlperf" "git+$mlperf"
