# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium with one page that tests read, type into and take screenshots of.

``with Browser(folder) as browser`` runs a Chromium with a profile in ``folder`` during the block.
Requests go over the DevTools protocol, with one websocket and one request at a time.
"""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import requests
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.waiting import await_true

START_SECONDS, ANSWER_SECONDS = 60, 30
SIZE = (1024, 768)
#: Special keys: name -> (code, number of the key, text).
KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Backspace": ("Backspace", 8, ""),
    "Tab": ("Tab", 9, ""),
    "Escape": ("Escape", 27, ""),
}
#: Character -> code of its key on a US keyboard. Characters with shift have the same code.
PLACES = {
    " ": "Space",
    "-": "Minus",
    "=": "Equal",
    "/": "Slash",
    ".": "Period",
    ",": "Comma",
    ";": "Semicolon",
    "'": "Quote",
    ">": "Period",
    "<": "Comma",
    "|": "Backslash",
    "\\": "Backslash",
    "_": "Minus",
    "$": "Digit4",
    "&": "Digit7",
    '"': "Quote",
    ":": "Semicolon",
    "?": "Slash",
    "(": "Digit9",
    ")": "Digit0",
}
#: Code of a key -> number of the key in Windows, for pages that do not use the codes.
NUMBERS = {
    "Space": 32,
    "Semicolon": 186,
    "Equal": 187,
    "Comma": 188,
    "Minus": 189,
    "Period": 190,
    "Slash": 191,
    "Backslash": 220,
    "Quote": 222,
}
SHIFTED = set('><|_$&":?()')


#: Options that keep the frame of another site in the process of its page, so that a test can read
#: the frame.
ONE_PROCESS = (
    "--disable-site-isolation-trials",
    "--disable-features=IsolateOrigins,site-per-process",
)


class PageChanged(AssertionError):
    """The page or the frame navigated to another address during a request."""


class Browser:
    """One page. ``options`` are further options of the command line."""

    def __init__(
        self, folder: Path, program: str = "chromium", options: Sequence[str] = ()
    ) -> None:
        self._folder, self._program, self._options = folder, program, options
        self._process: subprocess.Popen[bytes] | None = None
        self._page: ClientConnection | None = None
        self._requests = 0
        #: Console messages and uncaught errors of the page.
        self.messages: list[str] = []

    def __enter__(self) -> Browser:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    "--headless",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--disable-dev-shm-usage",
                    "--no-first-run",
                    "--disable-extensions",
                    "--disable-background-networking",
                    "--no-proxy-server",
                    "--mute-audio",
                    "--hide-scrollbars",
                    f"--window-size={SIZE[0]},{SIZE[1]}",
                    "--remote-debugging-port=0",
                    f"--user-data-dir={self._folder}",
                    *self._options,
                    "about:blank",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            port = self._await(self._port, START_SECONDS, "no DevTools port")
            page = requests.put(
                f"http://127.0.0.1:{port}/json/new?{quote('about:blank')}",
                timeout=ANSWER_SECONDS,
                proxies={"http": ""},
            ).json()
            self._attach(page["webSocketDebuggerUrl"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def _attach(self, url: str) -> None:
        self._page = connect(url, max_size=64 << 20, proxy=None, legacy=True)
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    @contextmanager
    def second_page(self, *, same_profile: bool) -> Iterator[Browser]:
        """Yield another page of this browser. A new profile has no cookies."""
        port = self._port()
        version = requests.get(
            f"http://127.0.0.1:{port}/json/version", timeout=ANSWER_SECONDS, proxies={"http": ""}
        ).json()
        whole, page = Browser(self._folder), Browser(self._folder)
        with connect(version["webSocketDebuggerUrl"], proxy=None, legacy=True) as whole._page:
            profile = (
                {}
                if same_profile
                else whole.send("Target.createBrowserContext", disposeOnDetach=True)
            )
            target = whole.send("Target.createTarget", url="about:blank", **profile)["targetId"]
            try:
                page._attach(f"ws://127.0.0.1:{port}/devtools/page/{target}")
                yield page
            finally:
                page.__exit__()
                whole.send("Target.closeTarget", targetId=target)

    def __exit__(self, *failure: object) -> None:
        if self._page is not None:
            self._page.close()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)

    def _port(self) -> str:
        assert self._process is not None
        port_file = self._folder / "DevToolsActivePort"
        assert self._process.poll() is None, (self._folder / "chromium.log").read_text(
            errors="replace"
        )[-2000:]
        return port_file.read_text().partition("\n")[0] if port_file.exists() else ""

    def _await(self, read: Callable[[], Any], seconds: float, story: str) -> Any:
        def read_or_none() -> Any:
            try:
                return read()
            except PageChanged:
                return None

        return await_true(
            read_or_none,
            seconds,
            lambda: f"{story}; the page said {self.messages[-20:]}",
            pause=0.1,
        )

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a request of the DevTools protocol and return the result.

        Messages of the page that arrive meanwhile are stored.
        """
        assert self._page is not None
        self._requests += 1
        self._page.send(json.dumps({"id": self._requests, "method": method, "params": parameters}))
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            try:
                message = json.loads(self._page.recv(timeout=max(0.0, deadline - time.monotonic())))
            except ConnectionClosed as error:
                raise AssertionError(f"the browser died during {method}") from error
            if message.get("id") == self._requests:
                if "error" in message:
                    raise PageChanged(method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
            self._store_message(message)

    def _store_message(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                self.messages.append(
                    " ".join(
                        str(part.get("value", part.get("description")))
                        for part in parameters["args"]
                    )
                )
            case "Runtime.exceptionThrown":
                self.messages.append(json.dumps(parameters["exceptionDetails"])[:500])
            case "Log.entryAdded":
                self.messages.append(parameters["entry"]["text"])

    def open(self, url: str) -> None:
        """Open an address and wait until the page is loaded."""
        self.send("Page.navigate", url=url)
        self.await_true("document.readyState === 'complete'", ANSWER_SECONDS)

    def evaluate(self, script: str, **context: Any) -> Any:
        """Return the value of an expression on the page."""
        answer = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, **context
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def evaluate_in_frame(self, script: str) -> Any:
        """Return the value of an expression in the page's first frame, or None without a frame.

        The frame of another site needs ``ONE_PROCESS``.
        """
        frames = self.send("Page.getFrameTree")["frameTree"].get("childFrames", ())
        if not frames:
            return None
        frame = self.send("Page.createIsolatedWorld", frameId=frames[0]["frame"]["id"])
        return self.evaluate(script, contextId=frame["executionContextId"])

    def await_in_frame(self, script: str, seconds: float = ANSWER_SECONDS) -> Any:
        """Wait until the expression is true in the first frame. Return the value."""
        return self._await(
            lambda: self.evaluate_in_frame(script), seconds, f"not true in the frame: {script}"
        )

    def await_true(self, script: str, seconds: float = ANSWER_SECONDS) -> Any:
        """Wait until the expression is true on the page. Return the value."""
        return self._await(
            lambda: self.evaluate(script), seconds, f"not true on the page: {script}"
        )

    def text(self, selector: str) -> str:
        """Return the text of an element, or "" if the element does not exist."""
        return str(
            self.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")
        )

    def picture(self, path: Path | None = None) -> bytes:
        """Return a screenshot of the page as PNG. Also write the PNG to ``path`` if given."""
        content = base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
        if path is not None:
            path.write_bytes(content)
        return content

    def click(self, x: float, y: float) -> None:
        """Click once with the left button."""
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type a text letter by letter on a US keyboard. A line break is the key Enter."""
        for letter in text:
            if letter == "\n":
                self.press("Enter")
                continue
            code = PLACES.get(letter) or (
                f"Digit{letter}" if letter.isdecimal() else f"Key{letter.upper()}"
            )
            shift = 8 if letter in SHIFTED or letter.isupper() else 0
            if shift:
                self.send(
                    "Input.dispatchKeyEvent",
                    type="rawKeyDown",
                    key="Shift",
                    code="ShiftLeft",
                    modifiers=shift,
                    windowsVirtualKeyCode=16,
                )
            number = NUMBERS.get(code) or ord(code[-1])
            self._press(letter, code, number, letter, shift)
            if shift:
                self.send(
                    "Input.dispatchKeyEvent",
                    type="keyUp",
                    key="Shift",
                    code="ShiftLeft",
                    windowsVirtualKeyCode=16,
                )

    def press(self, key: str) -> None:
        """Press and release a key of ``KEYS``."""
        self._press(key, *KEYS[key], 0)

    def _press(self, key: str, code: str, number: int, typed: str, modifiers: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=code,
                windowsVirtualKeyCode=number,
                modifiers=modifiers,
                **({"text": typed} if typed and kind == "keyDown" else {}),
            )
