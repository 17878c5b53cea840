"""Runs a script without the system calls that Windows, or macOS, lacks: python foreign_system.py PLATFORM SCRIPT

Modules that the standard library has loaded for Linux stay loaded, so starting processes is not tested.
"""

import concurrent.futures.process  # noqa: F401
import importlib.abc
import mmap
import os
import ssl  # noqa: F401
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
import urllib.request  # noqa: F401

import click  # noqa: F401
import h5py  # noqa: F401
import PIL.Image  # noqa: F401
import psutil  # noqa: F401
import torch  # noqa: F401

WINDOWS = {
    os: "pread preadv readv pwrite pwritev writev fork forkpty register_at_fork geteuid getuid getgid getegid getpgid "
    "setsid killpg sysconf uname statvfs fstatvfs mkfifo fchmod fchown chown lchown set_blocking pipe2 waitid "
    "posix_spawn O_CLOEXEC O_NONBLOCK O_NOFOLLOW O_DIRECTORY",
    mmap: "MAP_SHARED MAP_PRIVATE MAP_ANONYMOUS PROT_READ PROT_WRITE",
}
MACOS = {
    os: "sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate memfd_create MFD_CLOEXEC copy_file_range "
    "eventfd O_DIRECT O_TMPFILE"
}
BINARY = (".h5", ".tar", ".tfrecord", ".json", ".npy", ".jpg")
MODULES = {"win32": {"fcntl", "resource", "pwd", "grp", "termios"}, "darwin": set()}


class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in MODULES[sys.platform]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def without_folders(function):
    def call(path, *arguments, dir_fd=None, **options):
        if dir_fd is not None:
            raise NotImplementedError("dir_fd unavailable on this platform")
        if function is os_open and os.path.isdir(path):
            raise PermissionError(13, "Permission denied", path)
        if function is os_open and os.path.splitext(path)[1] in BINARY and not arguments[0] & os.O_BINARY:
            raise AssertionError(f"{path} was opened as text")
        return function(path, *arguments, **options)

    return call


os_open = os.open
sys.platform = sys.argv.pop(1)
for module, names in [*MACOS.items(), *(WINDOWS.items() if sys.platform == "win32" else ())]:
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in MODULES[sys.platform]:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Absent())
if sys.platform == "win32":
    os.supports_dir_fd, os.O_BINARY = set(), 0x8000
    for name in ("open", "stat", "unlink", "mkdir", "rmdir", "link", "symlink", "rename"):
        setattr(os, name, without_folders(getattr(os, name)))
else:
    import fcntl

    for name in ("F_OFD_SETLK", "F_OFD_GETLK", "F_ADD_SEALS"):
        delattr(fcntl, name)
del sys.argv[0]
with open(sys.argv[0], encoding="utf-8") as file:
    exec(compile(file.read(), sys.argv[0], "exec"), {"__name__": "__main__"})
