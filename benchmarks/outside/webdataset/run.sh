#!/bin/sh
# sh run.sh VENV IMAGES: the benchmark with webdataset, then with packer.
exec "$1/bin/python" "$(dirname "$0")/ours.py" "${2:?give IMAGES, class folders of JPEGs}"
