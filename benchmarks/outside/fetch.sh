#!/bin/sh
# fetch.sh VENV NAME SOURCE COMMIT PATH…: these paths of a repository at a commit, into VENV/NAME, and packer into VENV.
set -e
venv=$1 folder=$1/$2 source=$3 commit=$4
shift 4
root=$(cd "$(dirname "$0")/../.." && pwd)
"$venv/bin/python" -m pip install -q --disable-pip-version-check -c "$root/constraints.txt" "${PACKER:-$root}"
mkdir -p "$folder"
git -C "$folder" init -q
git -C "$folder" remote add origin "$source" 2> /dev/null || git -C "$folder" remote set-url origin "$source"
git -C "$folder" fetch -q --depth 1 --filter=blob:none origin "$commit"
git -C "$folder" checkout -q FETCH_HEAD -- "$@"
