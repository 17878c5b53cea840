#!/bin/sh
# Install the programs that tests/cluster starts: Debian packages, and Azurite below the given folder. Programs that
# cannot be installed are listed, and the tests that need them are skipped with the reason.
set -u
DEBIAN_FRONTEND=noninteractive
export DEBIAN_FRONTEND
packages="slurm-wlm munge openmpi-bin libopenmpi-dev mpich nfs-ganesha nfs-ganesha-vfs nfs-common user-mode-linux slirp
kmod iproute2"
command -v npm > /dev/null || packages="$packages npm"

if command -v apt-get > /dev/null; then
    missing=
    for package in $packages; do
        dpkg-query -W -f '${Status}' "$package" 2> /dev/null | grep -q ' installed' || missing="$missing $package"
    done
    if [ -n "$missing" ]; then
        apt-get update -q || echo "the lists of packages are old" >&2
        for package in $missing; do
            apt-get install -qqy --no-install-recommends "$package" > /dev/null || echo "not installed: $package" >&2
        done
    fi
else
    echo "not Debian; install by its own means: $packages" >&2
fi
if [ ! -x "$1/node_modules/.bin/azurite-blob" ]; then
    npm install --prefix "$1" --no-audit --no-fund --loglevel error azurite || echo "not installed: azurite" >&2
fi
exit 0
