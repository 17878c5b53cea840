#!/bin/sh
# torchcodec and torchvision from the registry, and torchcodec's benchmark of image decoders. Their wheels load libraries of
# the GPU build of torch, which pip installs with torch on Linux.
. "$(dirname "$0")/../get.sh"
packages torch torchvision==0.28.0 torchcodec==0.17.0
packages "${PACKER:-$root}" pillow_heif scipy
suite https://github.com/meta-pytorch/torchcodec 78ed5ad8b9ca735b0757ffa34f4426b371315a37
