#!/bin/sh
# sh install.sh VENV [SOURCE]: stable-worldmodel with its readers of LanceDB and HDF5, in VENV/worldmodel.
set -e
root=$(cd "$(dirname "$0")/../../.." && pwd)
install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check -c "$root/constraints.txt" "$@"; }
venv=$1
sh "$root/benchmarks/outside/fetch.sh" "$venv" worldmodel "${2:-https://github.com/galilai-group/stable-worldmodel}" \
  addbab40377da680dadbfbc90250fe749f6f57e3 scripts/benchmark stable_worldmodel pyproject.toml README.md
install torch==2.13.0 lancedb==0.40.0 pylance pyarrow h5py hdf5plugin s3fs obstore
install --no-deps torchvision==0.28.0
install -e "$venv/worldmodel"
