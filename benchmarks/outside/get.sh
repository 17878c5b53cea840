# Sourced by the install.sh of each suite: shell functions that install packages and fetch repositories.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
venv=${1:?usage: install.sh VENV [SOURCE]}
source=${2:-}

packages() { "$venv/bin/pip" install -q --disable-pip-version-check -c "$root/constraints.txt" "$@"; }

# suite URL REVISION: the suite's files at that revision, in VENV/suite
suite() {
  rm -rf "$venv/suite"
  git clone -q "${source:-$1}" "$venv/suite"
  git -C "$venv/suite" checkout -q "$2"
}

# files NAME URL COMMIT PATH…: the paths of a repository at a commit, in VENV/NAME
files() {
  folder=$venv/$1 url=${source:-$2} commit=$3
  shift 3
  mkdir -p "$folder"
  git -C "$folder" init -q
  git -C "$folder" remote add origin "$url" 2> /dev/null || git -C "$folder" remote set-url origin "$url"
  git -C "$folder" fetch -q --depth 1 --filter=blob:none origin "$commit"
  git -C "$folder" checkout -q FETCH_HEAD -- "$@"
}
