"""Lists of addresses: the fetched images, their columns, and the behaviour when a server fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import Hanging, make_jpeg
from suites.layouts import Layout, LayoutSuite, refusal, write_table

import packer
import readers
from cache.errors import BadSampleError
from cache.remote import is_public
from packer.formats.base import Arena
from packer.sources import url_list
from packer.sources.url_list import Fetcher, FetchOptions, Pace, without_query
from packer.testing.sources import Content, content_of, places
from readers.fields import decode_field

pytest.importorskip("urllib3", reason="urllib3, which fetches images, is not installed")

PICTURES = {f"/{number}.jpg": make_jpeg(number) for number in range(12)}
Answer = Callable[[BaseHTTPRequestHandler], None]


class Server(ThreadingHTTPServer):
    """Serves PICTURES. answers: other answers for a path, one after another; asked: the number of requests for each
    path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, list[Answer]] = {}
        self.asked: Counter[str] = Counter()
        self.end = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that hang up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # otherwise each answer waits for the acknowledgement of its headers
    server: Server

    def do_GET(self) -> None:
        self.server.asked[self.path] += 1
        answers = self.server.answers.get(self.path, [])
        answer = answers.pop(0) if len(answers) > 1 else answers[0] if answers else None
        if answer is not None:
            answer(self)
        elif self.path in PICTURES:
            respond(200, PICTURES[self.path])(self)
        else:
            respond(404, b"<html>")(self)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def respond(status: int, body: bytes = b"", length: int | None = None, **headers: str) -> Answer:
    """An answer; length: a false Content-Length, after which the connection ends."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.send_header("Content-Length", str(len(body) if length is None else length))
        request.end_headers()
        request.wfile.write(body)
        request.close_connection = length is not None

    return answer


def stall(request: BaseHTTPRequestHandler) -> None:
    """Send the first bytes, and then one occasionally, until the server ends."""
    request.send_response(200)
    request.send_header("Content-Length", "100000")
    request.end_headers()
    while not request.server.end.wait(0.02):  # type: ignore[attr-defined]
        request.wfile.write(b"\xff")
        request.wfile.flush()


def hang_up(request: BaseHTTPRequestHandler) -> None:
    request.connection.shutdown(socket.SHUT_RDWR)
    request.close_connection = True


OURS = respond(200, PICTURES["/1.jpg"])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield made
    made.end.set()
    made.shutdown()
    thread.join()
    made.server_close()


def fetcher(slept: list[float] | None = None, **options: Any) -> Fetcher:
    """A fetcher that records its waits instead of sleeping."""
    waits = [] if slept is None else slept
    made = FetchOptions(**{"private": True, "host_rate": 1e6, "timeout": 5.0, **options})
    return Fetcher(made, Pace(made.rate, made.host_rate, sleep=waits.append), sleep=waits.append)


OPTIONS = {"private": True, "host_rate": 1e5, "timeout": 10.0, "attempts": 2, "threads": 4}


class TestTables(LayoutSuite):
    @pytest.fixture(params=["csv", "parquet"])
    def layout(self, request: pytest.FixtureRequest, server: Server) -> Layout:
        def write(folder: Path) -> Path:
            rows = [
                {"url": server.url + path, "caption": f"number  {number}", "label": "cat" if number % 3 else "dog",
                 "split": "train" if number < 8 else "val", "key": f"k{number}", "width": "32"}
                for number, path in enumerate(PICTURES)
            ]  # fmt: skip
            return write_table(folder / f"list.{request.param}", rows)

        def truth(root: Path) -> Content:
            splits: dict[str, Any] = {"train": [], "val": []}
            for number, (path, data) in enumerate(PICTURES.items()):
                about = json.dumps({"url": server.url + path, "width": "32"}, separators=(",", ":")).encode()
                fields = (data, f"number {number}".encode(), about)
                splits["train" if number < 8 else "val"].append((f"k{number}", 0 if number % 3 else 1, fields))
            return Content(splits, ("cat", "dog"), ("image", "caption", "json"))

        return Layout(write, truth, options=OPTIONS)


def list_of(path: Path, *urls: str) -> Path:
    path.write_text("# a list\n\n" + "".join(f"{url}\n" for url in urls), encoding="utf-8")
    return path


@pytest.fixture
def addresses(tmp_path: Path, server: Server) -> Path:
    """A list of all pictures."""
    return list_of(tmp_path / "list.txt", *(server.url + name for name in PICTURES))


def images_of(root: Path, split: str | None = None) -> list[bytes]:
    with readers.open(root, split, verify=True) as reader:
        return [bytes(sample.image) for sample in reader]


def test_a_text_file_has_one_address_a_line(addresses: Path) -> None:
    read = content_of(packer.open_source(addresses, **OPTIONS)).splits["train"]
    assert [(key, fields[0]) for key, _, fields in read] == [
        (f"{number:09d}", data) for number, data in enumerate(PICTURES.values())
    ]


def test_a_column_of_splits(tmp_path: Path, server: Server) -> None:
    rows = [{"url": f"{server.url}/{i}.jpg", "fold": f"fold{i % 3}"} for i in range(12)]
    path = write_table(tmp_path / "list.csv", rows)
    listing = packer.open_source(path, split_column="fold", **OPTIONS).list(None)
    assert {name: [int(key) for key in part.keys] for name, part in listing.splits.items()} == {
        f"fold{i}": [*range(i, 12, 3)] for i in range(3)
    }
    assert "no column 'folds'" in refusal(path, split_column="folds", **OPTIONS)


def test_a_manifest_with_files_and_addresses_stays_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(PICTURES["/1.jpg"])
    (tmp_path / "list.csv").write_text("path,url\n1.jpg,https://example.org/1.jpg\n", encoding="utf-8")
    assert "manifest" in packer.open_source(tmp_path / "list.csv").title
    (tmp_path / "notes.txt").write_text("not a list of addresses\n", encoding="utf-8")
    assert "not a known kind of source" in refusal(tmp_path / "notes.txt")


# --- servers at fault ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("answers", "requests", "waits"),
    [
        ([respond(500), respond(502), respond(504), OURS], 4, 3),
        ([respond(429, Retry_After="7"), OURS], 2, 1),
        ([respond(200, b"\xff\xd8", length=5000), OURS], 2, 1),
        ([hang_up, OURS], 2, 1),
        ([respond(302, Location="/2.jpg")], 1, 0),
    ],
    ids=["several", "429 with Retry-After", "truncated", "no answer", "redirect"],
)
def test_temporary_failures_are_retried(server: Server, answers: list[Answer], requests: int, waits: int) -> None:
    slept: list[float] = []
    server.answers["/1.jpg"] = answers
    data = fetcher(slept).fetch(server.url + "/1.jpg")
    assert data in (PICTURES["/1.jpg"], PICTURES["/2.jpg"]) and server.asked["/1.jpg"] == requests
    assert len([seconds for seconds in slept if seconds > 0.1]) == waits


@pytest.mark.parametrize("header", ["7", formatdate(10**10, usegmt=True)])
def test_retry_after_is_respected(server: Server, header: str) -> None:
    slept: list[float] = []
    server.answers["/1.jpg"] = [respond(429, Retry_After=header), OURS]
    made = fetcher(slept)
    if header == "7":
        made.fetch(server.url + "/1.jpg")
        assert max(slept) == pytest.approx(7, abs=1)
    else:
        with pytest.raises(BadSampleError, match="HTTP 429"):
            made.fetch(server.url + "/1.jpg")
        assert server.asked["/1.jpg"] == 1, "a pause over two minutes was waited for"


def test_pauses_grow(server: Server) -> None:
    slept: list[float] = []
    server.answers["/1.jpg"] = [respond(503)]
    with pytest.raises(BadSampleError, match=r"not fetched: HTTP 503 Service Unavailable \(5 attempts\): http"):
        fetcher(slept).fetch(server.url + "/1.jpg")
    pauses = [seconds for seconds in slept if seconds > 0.1]
    assert len(pauses) == 4 and all(0.5 * 2**i <= pause <= 2**i for i, pause in enumerate(pauses))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (respond(404), "HTTP 404 Not Found"),
        (respond(403), "HTTP 403 Forbidden"),
        (respond(200, b"<html>no such image</html>", Content_Type="text/html"), "not an image (text/html)"),
        (respond(200), "an empty answer"),
        (respond(200, b"\xff\xd8" * 4000), "more than 5,000 bytes"),
        (respond(200, b"", length=1 << 40), "more than 5,000 bytes"),
        (respond(200, b"\x1f\x8b", Content_Encoding="gzip"), "compressed with gzip"),
        (respond(302, Location="file:///etc/passwd"), "not an address of http or https, but of 'file'"),
        (respond(302, Location="http://[::1/"), "an invalid address"),
        (respond(302, Location="http://user:secret@127.0.0.1/"), "not a valid address"),
        (respond(302, Location="/1.jpg"), "more than 5 redirects"),
        (respond(302), "HTTP 302"),
    ],
)
def test_permanent_failures_are_not_retried(server: Server, answer: Answer, message: str) -> None:
    slept: list[float] = []
    server.answers["/1.jpg"] = [answer]
    with pytest.raises(BadSampleError) as failure:
        fetcher(slept, max_bytes=5000).fetch(server.url + "/1.jpg")
    assert str(failure.value).startswith("not fetched: ") and message in str(failure.value)
    assert not [seconds for seconds in slept if seconds > 0.1] and "attempts" not in str(failure.value)


def test_a_stall_ends(server: Server) -> None:
    """Also where bytes arrive occasionally, so that no single read of the connection takes long."""
    server.answers["/1.jpg"] = [stall]
    with pytest.raises(BadSampleError, match=r"no full answer in 0\.3 s \(2 attempts\)"):
        fetcher(timeout=0.3, attempts=2).fetch(server.url + "/1.jpg")


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://h/x", "gopher://h", "http://", "http://u:p@h/", "http://[::1/", "http://a b/"]
)
def test_unsupported_addresses_are_not_requested(url: str) -> None:
    with pytest.raises(BadSampleError, match="not fetched: not a"):
        fetcher().fetch(url)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]"])
def test_hosts_of_this_machine_are_not_contacted_unless_allowed(server: Server, name: str) -> None:
    url = f"http://{name}:{server.server_port}/1.jpg"
    with pytest.raises(BadSampleError, match=r"in a private network: pass private=True"):
        fetcher(private=False).fetch(url)
    assert not server.asked, "a request was sent"
    assert name.startswith("[") or fetcher().fetch(url) == PICTURES["/1.jpg"]


PUBLIC = ("1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::1.1.1.1", "2002:101:101::")
PRIVATE = (
    *("127.0.0.1", "10.0.0.1", "169.254.169.254", "0.0.0.0", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
    *("224.0.0.1", "::1", "::", "fe80::1%eth0", "fd00:ec2::254", "fec0::1", "ff02::1", "::169.254.169.254"),
    *("::1.1.1.1", "::ffff:169.254.169.254", "::ffff:168.63.129.16", "64:ff9b::169.254.169.254", "64:ff9b::10.0.0.1"),
    *("64:ff9b:1::1.1.1.1", "2002:a9fe:a9fe::1", "2002:a00:1::", "2001:0:a9fe:a9fe::1"),
)


def test_addresses_that_lead_into_private_networks_are_not_public() -> None:
    assert [address for address in PUBLIC + PRIVATE if is_public(address)] == [*PUBLIC]


def test_no_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with pytest.raises(BadSampleError, match=r"the connection failed .* \(2 attempts\)"):
        fetcher(attempts=2).fetch(f"http://127.0.0.1:{port}/1.jpg")


# --- limits -------------------------------------------------------------------------------------------------------
def test_requests_keep_the_pace_of_all_and_of_each_host() -> None:
    """On a clock that stands still, each request gets the time that it has to wait."""
    waits: list[float] = []
    pace = Pace(rate=10, host_rate=4, clock=lambda: 100.0, sleep=waits.append)
    for host in ("a", "b", "a", "b", "a"):
        pace.wait(host)
    assert waits == pytest.approx([0.1, 0.25, 0.35, 0.5])  # the first request need not wait
    pace.hold("b", 30)
    pace.wait("b")
    pace.wait("c")
    assert waits[-2:] == pytest.approx([30, 0.6])


@pytest.mark.parametrize(
    "options", [{"rate": 0}, {"rate": float("inf")}, {"host_rate": 0}, {"threads": 0}, {"attempts": 0}, {"timeout": -1}]
)
def test_invalid_limits_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        FetchOptions(**options)


def test_requests_are_sent_ahead_and_no_more_than_threads_at_a_time(
    tmp_path: Path, server: Server, addresses: Path
) -> None:
    """The server answers none of the first four requests before it has all four."""
    together = threading.Barrier(4, timeout=300)
    most, now, lock = 0, 0, threading.Lock()

    def answer(request: BaseHTTPRequestHandler) -> None:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        if int(request.path[1:-4]) < 4:
            together.wait()
        with lock:
            now -= 1
        respond(200, PICTURES[request.path])(request)

    server.answers = {path: [answer] for path in PICTURES}
    packer.convert(packer.open_source(addresses, **OPTIONS), "tar", tmp_path / "out", run=packer.Run(workers=4))
    assert most == 4 and images_of(tmp_path / "out") == [*PICTURES.values()]


def test_images_ahead_take_bounded_memory(server: Server, addresses: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two images, only those, and one for each thread, are fetched before the first is read."""
    monkeypatch.setattr(url_list, "_AHEAD_BYTES", 2 * max(map(len, PICTURES.values())))
    source = packer.open_source(addresses, **{**OPTIONS, "threads": 2})
    first = threading.Event()

    def wait(request: BaseHTTPRequestHandler) -> None:
        first.wait(300)
        respond(200, PICTURES["/0.jpg"])(request)

    server.answers["/0.jpg"] = [wait]
    expected = [place for place, _ in places(source.list(None), "train")]
    with source.open() as reader:
        reader.expect(expected)
        threading.Timer(0.5, first.set).start()
        read = [reader.read(expected[0], Arena(lambda: None))[0]]
        assert sum(server.asked.values()) <= 5
        read += [reader.read(place, Arena(lambda: None))[0] for place in expected[1:]]
    assert read == [*PICTURES.values()]


def test_an_error_ends_stalled_requests(tmp_path: Path, server: Server, addresses: Path, hanging: Hanging) -> None:
    """The first image is missing, and all others would take minutes."""
    server.answers = {path: [respond(404) if path == "/0.jpg" else stall] for path in PICTURES}
    source = packer.open_source(addresses, **{**OPTIONS, "timeout": 600.0})
    with pytest.raises(BadSampleError, match="HTTP 404"):
        hanging(lambda: packer.convert(source, "tar", tmp_path / "out", run=packer.Run(workers=1)), 30)


# --- conversions --------------------------------------------------------------------------------------------------
def test_failures_are_reported_with_address_and_status(tmp_path: Path, server: Server, addresses: Path) -> None:
    server.answers = {"/3.jpg": [respond(404)], "/5.jpg": [respond(503)], "/6.jpg": [respond(200, b"<html>")]}
    with pytest.raises(BadSampleError, match=r"HTTP 404 Not Found: http.*on_error='skip'"):
        packer.convert(packer.open_source(addresses, **OPTIONS), "tar", tmp_path / "out", run=packer.Run(workers=1))
    source = packer.open_source(addresses, **{**OPTIONS, "attempts": 1})
    result = packer.convert(source, "tar", tmp_path / "out", run=packer.Run(workers=1, on_error="skip"), overwrite=True)
    assert result.samples == 9 and result.left_out == {"skipped": 3}
    reasons = ("HTTP 404 Not Found", "HTTP 503 Service Unavailable", "not an image")
    assert result.left_out_reasons == {f"not fetched: {reason}": 1 for reason in reasons}
    report = [json.loads(line) for line in (tmp_path / "out/left-out.jsonl").read_text().splitlines()]
    assert f"HTTP 404 Not Found: {server.url}/3.jpg" in report[0]["reason"]


def test_a_list_is_cut_into_shards_although_no_size_is_known(tmp_path: Path, addresses: Path) -> None:
    shards, run = packer.Shards(size=4 * 128 << 10), packer.Run(workers=1)
    source = packer.open_source(addresses, **OPTIONS)
    assert packer.convert(source, "tar", tmp_path / "out", shards=shards, run=run).shards == 3


def test_credentials_in_an_address_are_neither_packed_nor_shown(tmp_path: Path, server: Server) -> None:
    """Signed addresses are requested unchanged; neither the set nor its failures contain the query."""
    signed = "?X-Amz-Signature=c0ffee&X-Amz-Credential=AKIA#sig"
    path = list_of(tmp_path / "list.txt", f"{server.url}/0.jpg{signed}", f"{server.url}/missing.jpg{signed}")
    server.answers["/0.jpg" + signed.partition("#")[0]] = [respond(200, PICTURES["/0.jpg"])]
    source = packer.open_source(path, **OPTIONS)
    result = packer.convert(source, "tar", tmp_path / "out", run=packer.Run(on_error="skip", workers=1))
    assert (result.samples, result.left_out) == (1, {"skipped": 1})
    with readers.open(tmp_path / "out") as reader:
        assert decode_field("json", reader[0].fields["json"]) == {"url": f"{server.url}/0.jpg"}
    assert f"{server.url}/missing.jpg" in (tmp_path / "out" / "left-out.jsonl").read_text()
    for file in (file for file in (tmp_path / "out").rglob("*") if file.is_file()):
        assert b"c0ffee" not in file.read_bytes() and b"AKIA" not in file.read_bytes(), file


def test_an_address_is_stored_up_to_its_query() -> None:
    for url, stored in (
        ("http://host/a/b.jpg", "http://host/a/b.jpg"),
        ("http://user:word@host:80/a%20b.jpg?x=1@2#y", "http://host:80/a%20b.jpg"),
        ("https://host?key=a/b", "https://host"),
        ("https://host/a@b/c.jpg", "https://host/a@b/c.jpg"),
    ):
        assert without_query(url) == stored


def test_a_kill_loses_no_complete_shard(tmp_path: Path, server: Server, addresses: Path) -> None:
    """The server kills the conversion in its third shard; the earlier shards are not fetched again."""
    line = (sys.executable, "-m", "packer", "convert", addresses, "--to", "tar", "-o", tmp_path / "out", "--private",
            "--samples-per-shard", "4", "--threads", "1")  # fmt: skip
    running = subprocess.Popen([*map(str, line)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def kill(request: BaseHTTPRequestHandler) -> None:
        os.kill(running.pid, signal.SIGKILL)
        hang_up(request)

    server.answers["/9.jpg"] = [kill, respond(200, PICTURES["/9.jpg"])]
    running.communicate(timeout=300)
    assert running.returncode == -signal.SIGKILL and not (tmp_path / "out/dataset.json").exists()
    before = Counter(server.asked)
    done = subprocess.run([*map(str, line)], capture_output=True, text=True, timeout=300, check=True)
    assert "2 of 3 shards are complete already" in done.stderr
    again = {name for name in PICTURES if server.asked[name] > before[name]}
    assert again == {f"/{number}.jpg" for number in range(8, 12)}
    assert images_of(tmp_path / "out") == [*PICTURES.values()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("url,key\nhttp://h/1,../x\n", "leads outside"),
        ("url,key\nhttp://h/1,a\nhttp://h/2,a\n", "keys occur twice"),
        ("url,split\nhttp://h/1,a/b\n", "cannot be the name of a split"),
        ("url,label\nhttp://h/1,3\nhttp://h/2,x\n", "is a name, but"),
        ("url\nhttp://h/1\n\n,\n", "has 2 values"),
        ("url,x\nhttp://h/1,1\n,2\n", "line 3: no address in the column 'url'"),
    ],
)
def test_a_malicious_list_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "list.csv").write_text(text, encoding="utf-8")
    assert message in refusal(tmp_path / "list.csv")
