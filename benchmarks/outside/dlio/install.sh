#!/bin/sh
# sh install.sh VENV [SOURCE [SOURCE]]: DLIO of argonne-lcf, and in VENV/mlperf the DLIO of MLPerf Storage v3.0.
. "$(dirname "$0")/../get.sh"
argonne=${source:-https://github.com/argonne-lcf/dlio_benchmark} mlperf=${3:-https://github.com/mlcommons/DLIO_local_changes}
at() { case $1 in /*) echo "git+file://$1@$2" ;; *) echo "git+$1@$2" ;; esac; }
packages torch==2.13.0
packages "${PACKER:-$root}"
# Both require TensorFlow and DALI, which PyTorch's workloads do not import; the second also requires Python 3.12.
packages mpi4py mpich hydra-core omegaconf pandas psutil pyyaml pydftracer setuptools wheel
packages --no-deps "$(at "$argonne" e1919d7b6ccffbe15143cd616517da9e5d7b26a7)"
packages --no-deps --ignore-requires-python --target "$venv/mlperf" \
  "$(at "$mlperf" f6796ed281e39ccc83a450e2b1f21b9c909d8fd0)"
