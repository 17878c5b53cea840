#!/bin/sh
# torchcodec and torchvision from the package index, torchcodec's benchmark of image decoders, and its picture from scipy.
# The wheels load libraries of the GPU build of torch, which pip installs on Linux.
. "$(dirname "$0")/../get.sh"
packages torch torchvision==0.28.0 torchcodec==0.17.0
packages "${PACKER:-$root}" pillow_heif scipy pooch
suite https://github.com/meta-pytorch/torchcodec 78ed5ad8b9ca735b0757ffa34f4426b371315a37
"$venv/bin/python" -c 'import scipy.datasets; scipy.datasets.face()'
