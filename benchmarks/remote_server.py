"""A web server for `remote.py` and `urls.py` that serves the ranges of a folder's files after a delay. Prints its port.

    python benchmarks/remote_server.py FOLDER MILLISECONDS [MB_S]

S3 clients can use a folder as a bucket, with path-style requests: HEAD and ListObjectsV2.

MILLISECONDS is a number or a range like 20-50 from which each delay is drawn. MB_S is the bandwidth that all
connections share, in MB/s. The query of an address (after ?) is ignored, except in listings. GET /-/count returns the
number of earlier GETs and of bytes sent. The server ends when its standard input closes.
"""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs

__all__ = ["served"]


@contextmanager
def served(root: Path, milliseconds: object = 0, mb_s: float = 0) -> Iterator[tuple[str, int]]:
    """The address of a server in a separate process, and the process. mb_s: 0 for no limit."""
    command = [sys.executable, __file__, str(root), str(milliseconds), str(mb_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid
        finally:
            process.stdin.close()
            process.kill()


_PIECE = 64 << 10


class Server:
    def __init__(self, root: Path, delay_s: tuple[float, float], mb_s: float) -> None:
        self.root, self.delay_s, self.gets, self.sent = root, delay_s, 0, 0
        self.mb_s, self.free_at = mb_s, 0.0  # when the link has sent all bytes

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await reader.readuntil(b"\r\n\r\n"):
                head = request.decode("latin-1")
                method, path, _ = head.split(" ", 2)
                await self.answer(method, path, head, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, method: str, path: str, head: str, writer: asyncio.StreamWriter) -> None:
        if path == "/-/count":
            body = f"{self.gets} {self.sent}".encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            return
        self.gets += method == "GET"
        await asyncio.sleep(random.uniform(*self.delay_s))
        if "list-type=2" in path:
            body = self.listed(path).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            return
        file = self.root / path.partition("?")[0].lstrip("/")
        if not file.is_file():
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        size = file.stat().st_size
        match = re.search(r"(?i)\r\nrange: bytes=(\d+)-(\d*)", head)
        start, stop = (int(match[1]), min(size, int(match[2] or size) + 1)) if match else (0, size)
        status = f"206 Partial Content\r\nContent-Range: bytes {start}-{stop - 1}/{size}" if match else "200 OK"
        ranges = "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nAccept-Ranges: bytes"
        writer.write(
            f'HTTP/1.1 {status}\r\nContent-Length: {stop - start}\r\nETag: "{size:x}"\r\n{ranges}\r\n\r\n'.encode()
        )
        if method == "GET":
            self.sent += stop - start
            with open(file, "rb") as opened:
                await writer.drain()
                loop = asyncio.get_running_loop()
                for at in range(start, stop, size := _PIECE if self.mb_s else stop - start):
                    await self.wait_for_line(min(size, stop - at))
                    await loop.sendfile(writer.transport, opened, at, min(size, stop - at), fallback=True)

    async def wait_for_line(self, count: int) -> None:
        if self.mb_s:
            now = asyncio.get_running_loop().time()
            self.free_at = max(self.free_at, now) + count / 1e6 / self.mb_s
            await asyncio.sleep(self.free_at - now)

    def listed(self, path: str) -> str:
        """The objects of a bucket whose keys begin with prefix=; with delimiter=/ only its folders."""
        bucket, _, query = path.partition("?")
        parameters = {name: values[0] for name, values in parse_qs(query).items()}
        prefix, folder, rows, folders = parameters.get("prefix", ""), self.root / bucket.strip("/"), [], set()
        for file in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
            key, size = file.relative_to(folder).as_posix(), file.stat().st_size
            if not key.startswith(prefix):
                continue
            below, slash, _ = key[len(prefix) :].partition(parameters.get("delimiter", "\0"))
            if slash:
                folders.add(f"<CommonPrefixes><Prefix>{prefix}{below}{slash}</Prefix></CommonPrefixes>")
                continue
            when = "2026-01-01T00:00:00.000Z"
            rows.append(
                f'<Contents><Key>{key}</Key><LastModified>{when}</LastModified><ETag>"{size:x}"</ETag>'
                f"<Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows + sorted(folders))}</ListBucketResult>"


async def main() -> None:
    least, _, most = sys.argv[2].partition("-")
    mb_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    server = Server(Path(sys.argv[1]), (float(least) / 1000, float(most or least) / 1000), mb_s)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, limit=1 << 16)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
