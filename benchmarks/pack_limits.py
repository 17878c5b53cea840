"""What no packer can beat by much: moving the same bytes with nothing added."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Sequence

from harness import contender
from machine import list_tree

__all__ = ["CAT", "LOOP"]

CAT = "limit: cat to one file"
LOOP = "limit: two processes, read and write"
_BUFFER_BYTES = 1 << 24


@contender(CAT, note="find, sort, xargs and one cat process")
def cat(tree: str, output: str) -> None:
    script = 'find "$1" -type f -print0 | sort -z | xargs -0 cat > "$2/all.bin"'
    subprocess.run(["sh", "-c", script, "sh", tree, output], check=True)


@contender(LOOP, imports="multiprocessing", note="2 forked processes: open, read, close, write each file; listing")
def loop(tree: str, output: str) -> None:
    paths = [path for path, _ in list_tree(tree)]
    half = len(paths) // 2
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=_copy, args=(part, os.path.join(output, f"{number}.bin")))
        for number, part in enumerate((paths[:half], paths[half:]))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _copy(paths: Sequence[str], target: str) -> None:
    block = memoryview(bytearray(_BUFFER_BYTES))
    out = os.open(target, os.O_CREAT | os.O_WRONLY)
    for path in paths:
        source = os.open(path, os.O_RDONLY)
        count = os.readv(source, [block])
        os.close(source)
        os.write(out, block[:count])
    os.close(out)
