#!/bin/sh
# sh install.sh VENV: array_record, and the text generator of its performance guide (google/array_record,
# docs/performance.md).
. "$(dirname "$0")/../get.sh"
packages "${PACKER:-$root}" array-record==0.8.6 lorem-text==3.0
