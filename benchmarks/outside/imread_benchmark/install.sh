#!/bin/sh
# imread_benchmark with the decoders of its group "mainstream" (without torchvision, whose wheel needs the GPU build of
# torch), and packer's row, which it finds by an entry point. It refuses editable installations.
. "$(dirname "$0")/../get.sh"
packages torch
packages "${PACKER:-$root}" ajpegli imagecodecs imageio kornia-rs opencv-python-headless pillow simplejpeg \
  jsonschema pandas py-cpuinfo pyyaml tqdm 'typer>=0.12' zstandard
suite https://github.com/ternaus/imread_benchmark eb3b2e9c72b7e165ffdece6d51eeba2462bb5dcf
packages --no-deps "$venv/suite" "$here/row"
