#!/bin/sh
# torchdata, the requirements of its tests, and the tests of the same version
. "$(dirname "$0")/../get.sh"
packages torch
packages "${PACKER:-$root}[torch]" torchdata==0.11.0 datasets pytest parameterized expecttest
suite https://github.com/meta-pytorch/data v0.11.0
