#!/bin/sh
# sh run.sh VENV IMAGES: the benchmark, with rows of packer.
exec "$1/bin/python" "$(dirname "$0")/ours.py" "${2:?give IMAGES, class folders of JPEGs}"
