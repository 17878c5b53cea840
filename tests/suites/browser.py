"""A headless Chromium, driven over DevTools by two pipes: keys, clicks, transfers and complaints.

Every wait is bounded. `Page.complaints` lists logged errors and dialogs of a page.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO

import pytest

__all__ = ["Browser", "Page", "find_chromium", "range_server"]

_WAIT = 300
_KEYS = {"Enter": 13, "Escape": 27, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38,
         "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}  # fmt: skip
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
          "--mute-audio", "--disable-extensions", "--disable-component-update", "--disable-background-networking",
          "--remote-debugging-pipe")  # fmt: skip

_SHORTHANDS = """globalThis.$ = selector => document.querySelector(selector);
globalThis.$$ = selector => [...document.querySelectorAll(selector)];"""


def find_chromium() -> str:
    """The path of Chromium. Without one the test is skipped, or fails if PACKER_TEST_CHROMIUM is "required"."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        assert os.environ.get("PACKER_TEST_CHROMIUM") != "required", "no Chromium was found"
        pytest.skip("needs Chromium")
    return path


class Browser:
    """One process of Chromium, with a profile in `folder`."""

    def __init__(self, program: str, folder: Path) -> None:
        (child_in, to_child), (from_child, child_out) = os.pipe(), os.pipe()
        command = f'exec "$0" "$@" 3<&{child_in} 4>&{child_out}'  # as Chromium expects them
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *_FLAGS, f"--user-data-dir={folder}"],
            pass_fds=(child_in, child_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(child_in)
        os.close(child_out)
        self._out: BinaryIO = os.fdopen(to_child, "wb", buffering=0)
        self._in: BinaryIO = os.fdopen(from_child, "rb")
        self._changed = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self._number = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        rest = b""
        while part := os.read(self._in.fileno(), 1 << 20):
            *whole, rest = (rest + part).split(b"\0")
            with self._changed:
                for text in whole:
                    message = json.loads(text)
                    if "id" in message:
                        self._answers[message["id"]] = message
                    else:
                        self.events.append(message)
                self._changed.notify_all()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of a DevTools command."""
        with self._changed:
            self._number += 1
            number, message = self._number, {"id": self._number, "method": method, "params": parameters}
            self._out.write(json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
            assert self._changed.wait_for(lambda: number in self._answers, _WAIT), f"no answer to {method}"
            answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str, *, width: int = 1280, height: int = 800, scale: float = 1, dark: bool = False) -> Page:
        """A new page of this size in CSS pixels. Scripts may use $ for one element and $$ for all matching elements."""
        context = self.call("Target.createBrowserContext")["browserContextId"]  # pages share no cache
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        page = Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.resize(width, height, scale)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.addScriptToEvaluateOnNewDocument", source=_SHORTHANDS)
        page.call("Page.navigate", url=url)
        return page

    def close(self) -> None:
        self.call("Browser.close")
        self._process.wait(_WAIT)
        self._reader.join(_WAIT)
        self._out.close()
        self._in.close()


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self._forgiven = 0
        self._is_closed = False

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def events(self, method: str) -> list[dict[str, Any]]:
        """The parameters of all events of this name so far."""
        events = list(self._browser.events)
        return [
            event["params"] for event in events if (event["method"], event.get("sessionId")) == (method, self._session)
        ]

    def js(self, expression: str) -> Any:
        """The awaited value of an expression."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 120) -> Any:
        """The value of an expression as soon as it is true, checked before each frame."""
        script = f"""new Promise((resolve, reject) => {{
            const end = performance.now() + {1000 * seconds};
            const look = () => {{
                let value = null;
                try {{ value = ({condition}); if (value instanceof Node) value = true; }}
                catch (error) {{ if (performance.now() > end) return reject(error); }}
                if (value || performance.now() > end) resolve(value); else setTimeout(look, 10);
            }};
            look();
        }})"""
        value = self.js(script)
        text = "" if value else self.js("document.body?.innerText.slice(0, 900)")
        assert value, f"never true: {condition}; complaints: {self.complaints}; {text}"
        return value

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale}
        self.call("Emulation.setDeviceMetricsOverride", mobile=False, **size)

    def key(self, *names: str, control: bool = False) -> None:
        """Press keys in turn: characters, or the names of KeyboardEvent.key."""
        for name in names:
            key = {"key": name, "windowsVirtualKeyCode": _KEYS.get(name, ord(name.upper()) if len(name) == 1 else 0)}
            text = {"Enter": "\r"}.get(name, name if len(name) == 1 and not control else "")
            self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", modifiers=2 * control,
                      **key, **({"text": text} if text else {}))  # fmt: skip
            self.call("Input.dispatchKeyEvent", type="keyUp", modifiers=2 * control, **key)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Click on the middle of an element like a mouse."""
        script = """(e => { e.scrollIntoView({block: "nearest"}); const b = e.getBoundingClientRect();
                    return [b.x + b.width / 2, b.y + b.height / 2]; })"""
        x, y = self.js(f"{script}(document.querySelector({json.dumps(selector)}))")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    @property
    def transfers(self) -> list[tuple[str, int]]:
        """(address, bytes on the wire with headers) of all transfers so far."""
        urls = {event["requestId"]: event["request"]["url"] for event in self.events("Network.requestWillBeSent")}
        done = self.events("Network.loadingFinished")
        return [
            (urls[event["requestId"]], int(event["encodedDataLength"])) for event in done if event["requestId"] in urls
        ]

    @property
    def complaints(self) -> list[str]:
        """Exceptions, errors and warnings of the console (including violations of the policy), and dialogs."""
        thrown = [event["exceptionDetails"] for event in self.events("Runtime.exceptionThrown")]
        logged = [event["entry"] for event in self.events("Log.entryAdded")]
        called = [event for event in self.events("Runtime.consoleAPICalled") if event["type"] in ("error", "assert")]
        dialogs = self.events("Page.javascriptDialogOpening")
        return [json.dumps(complaint)[:600] for complaint in (*thrown, *logged, *called, *dialogs)][self._forgiven :]

    def forgive(self) -> None:
        """Discard the complaints so far, which were expected."""
        self._forgiven += len(self.complaints)

    def close(self) -> None:
        """Close the page, once; it fetches nothing afterwards."""
        if not self._is_closed:
            self._is_closed = True
            self.call("Page.close")


class _RangeHandler(SimpleHTTPRequestHandler):
    """Serves files like a plain web server, with one range."""

    protocol_version = "HTTP/1.1"
    answers_ranges = True
    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".js": "text/javascript"}

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.is_dir():
            path /= "index.html"
        if not path.is_file():
            return self.send_error(404)
        size, match = path.stat().st_size, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        match = match if self.answers_ranges else None
        first, end = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
        if first >= end and match:
            return self.send_error(416)
        self.send_response(206 if match else 200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Length", str(end - first))
        if match:
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{size}")
        self.end_headers()
        with path.open("rb") as file:
            file.seek(first)
            self.wfile.write(file.read(end - first))
        return None


class _RangeServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that disconnects."""


@contextmanager
def range_server(folder: Path, *, answers_ranges: bool = True) -> Iterator[str]:
    """The address of a web server over a folder. ranges: whether it answers Range requests or always sends the whole
    file."""
    handler = type("Handler", (_RangeHandler,), {"answers_ranges": answers_ranges})
    with _RangeServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()
