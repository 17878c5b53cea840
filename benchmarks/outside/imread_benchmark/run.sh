#!/bin/sh
# sh run.sh VENV IMAGES: a campaign of imread_benchmark (plan.yaml) over a folder of JPEGs.
exec "$1/bin/python" "$(dirname "$0")/run.py" "$1" "${2:?imread_benchmark needs IMAGES, a folder of JPEGs}"
