#!/bin/sh
# An environment with packer and DLIO:  sh install.sh VENV
# VENV/bin/dlio_benchmark is DLIO of argonne-lcf; PYTHONPATH=VENV/mlperf makes it the DLIO that MLPerf Storage v3.0 uses.
# ARGONNE, MLPERF: where the two repositories are, such as clones.
set -e
root=$(cd "$(dirname "$0")/../../.." && pwd)
argonne=${ARGONNE:-https://github.com/argonne-lcf/dlio_benchmark}@e1919d7b6ccffbe15143cd616517da9e5d7b26a7
mlperf=${MLPERF:-https://github.com/mlcommons/DLIO_local_changes}@f6796ed281e39ccc83a450e2b1f21b9c909d8fd0
venv=$1
${PYTHON:-python3} -m venv "$venv"
install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check -c "$root/constraints.txt" "$@"; }
install torch==2.13.0
install -e "$root[torch]"
# The two require TensorFlow and DALI, which PyTorch workloads do not import, and one of them Python 3.12.
install mpi4py mpich hydra-core omegaconf pandas psutil pyyaml pydftracer setuptools wheel
install --no-deps "git+$argonne"
install --no-deps --ignore-requires-python --target "$venv/mlperf" "git+$mlperf"
