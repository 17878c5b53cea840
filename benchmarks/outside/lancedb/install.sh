#!/bin/sh
# sh install.sh VENV [SOURCE]: LanceDB, and its benchmark in VENV/lancedb.
set -e
root=$(cd "$(dirname "$0")/../../.." && pwd)
install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check -c "$root/constraints.txt" "$@"; }
venv=$1
sh "$root/benchmarks/outside/fetch.sh" "$venv" lancedb "${2:-https://github.com/lancedb/lancedb}" \
  45cd05347846bc2280103680e497e8fc0cdf480e python/benchmarks
install torch==2.13.0 lancedb==0.40.0 pylance pyarrow
