#!/bin/sh
# sh install.sh VENV [SOURCE]: LanceDB, and its benchmark in VENV/lancedb.
. "$(dirname "$0")/../get.sh"
packages "${PACKER:-$root}"
files lancedb https://github.com/lancedb/lancedb \
  45cd05347846bc2280103680e497e8fc0cdf480e python/benchmarks
packages torch==2.13.0 lancedb==0.40.0 pylance pyarrow
