#!/bin/sh
# sh install.sh VENV: fio of the distribution (needs root to install it), and packer.
. "$(dirname "$0")/../get.sh"
command -v fio > /dev/null || apt-get install -qqy fio > /dev/null
packages "${PACKER:-$root}"
