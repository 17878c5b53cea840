#!/bin/sh
# sh install.sh VENV [SOURCE]: stable-worldmodel with its readers of LanceDB and HDF5, in VENV/worldmodel.
. "$(dirname "$0")/../get.sh"
packages "${PACKER:-$root}"
files worldmodel https://github.com/galilai-group/stable-worldmodel \
  addbab40377da680dadbfbc90250fe749f6f57e3 scripts/benchmark stable_worldmodel pyproject.toml README.md
packages torch==2.13.0 lancedb==0.40.0 pylance pyarrow h5py hdf5plugin s3fs obstore
packages --no-deps torchvision==0.28.0
packages -e "$venv/worldmodel"
