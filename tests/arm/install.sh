#!/bin/sh
# install.sh FOLDER PIP: install a Python for aarch64 with the core's packages into FOLDER, and QEMU to run it. Needs
# Debian with Python 3.11 or newer.
set -eu
DEBIAN_FRONTEND=noninteractive
export DEBIAN_FRONTEND
folder=$1
pip=$2
command -v apt-get > /dev/null || { echo "make test-arm takes its Python from Debian's packages: it needs apt-get" >&2; exit 1; }
if ! dpkg --print-foreign-architectures | grep -qx arm64; then
    dpkg --add-architecture arm64
    trap 'dpkg --remove-architecture arm64' EXIT
fi
apt-get update -q
apt-get install -qqy --no-install-recommends qemu-user-static > /dev/null
mkdir -p "$folder/debian" "$folder/root" "$folder/site"
version=$(apt-cache depends python3:arm64 | sed -n 's/.*Depends: python\(3\.[0-9]*\).*/\1/p' | head -n 1)
packages="libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5 libssl3 libcrypt1 libsqlite3-0
python$version python$version-minimal libpython$version-minimal libpython$version-stdlib"
(cd "$folder/debian" && for package in $packages; do apt-get download -q "$package:arm64"; done)
for package in "$folder"/debian/*.deb; do dpkg -x "$package" "$folder/root"; done
rm -rf "$folder/debian"
# Packages of this machine do not count: these are the wheels for the other architecture.
"$pip" install -q --disable-pip-version-check --no-compile --target "$folder/site" --only-binary :all: \
    --python-version "$version" --implementation cp --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 \
    --platform manylinux_2_27_aarch64 numpy h5py click crc32c pillow zstandard simplejpeg lazy_loader packaging psutil
cat > "$folder/python" << END
#!/bin/sh
exec qemu-aarch64-static -L '$folder/root' '$folder/root/usr/bin/python$version' "\$@"
END
chmod +x "$folder/python"
