# Sourced by the install.sh of each suite, in whose folder it is: a shell function for what pip installs, one for a repository.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
venv=${1:?usage: install.sh VENV [SOURCE]}
source=${2:-}

packages() { "$venv/bin/pip" install -q --disable-pip-version-check --no-compile -c "$root/constraints.txt" "$@"; }

# suite URL REVISION: the suite's files at that revision, in VENV/suite
suite() {
  rm -rf "$venv/suite"
  git clone -q "${source:-$1}" "$venv/suite"
  git -C "$venv/suite" checkout -q "$2"
}
