#!/bin/sh
# accelerate, torchdata, and accelerate's tests of the last commit that works with the test helpers of the 1.15.0 wheel
. "$(dirname "$0")/../get.sh"
packages torch
packages "${PACKER:-$root}[torch]" accelerate==1.15.0 torchdata==0.11.0 pytest parameterized
suite https://github.com/huggingface/accelerate 16cb6eb80dd9aa8b4df1a63ef57863e455d53b83
