"""A headless Chromium that tests drive: it reads commands at descriptor 3 and answers at 4, in JSON with a NUL after each."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests in containers run as root, for whom there is none; the pages are ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
_FIRST_FREE_FD = 10
_KEY_CODES = {
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
}
SHIFT = 8


@cache
def find_chromium() -> str | None:
    """The path of one that starts, or None. (Some systems have a script of this name that only says how to install it.)"""
    for name in _NAMES:
        path = shutil.which(name)
        if path is None:
            continue
        try:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and "Chrom" in done.stdout:
            return path
    return None


class BrowserError(Exception):
    """The browser said that a command failed, or did not answer in time."""


class Page:
    """A tab.

    Attributes:
        complaints: what the page wrote to the console as warnings and errors, exceptions that nobody caught, and each request that
            it made beyond its own file.
    """

    def __init__(self, commands_fd: int, answers_fd: int, timeout_s: float) -> None:
        self.complaints: list[str] = []
        self._commands_fd, self._answers_fd, self._timeout_s = commands_fd, answers_fd, timeout_s
        self._num_sent = 0
        self._unread = b""
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its answer."""
        self._num_sent += 1
        message: dict[str, Any] = {"id": self._num_sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self._commands_fd, text) :]
        until = time.monotonic() + self._timeout_s
        while (answer := self._receive(until)).get("id") != self._num_sent:
            self._note(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._answers_fd], [], [], max(until - time.monotonic(), 0))[0]:
                raise BrowserError(f"no answer within {self._timeout_s:g} s")
            more = os.read(self._answers_fd, 1 << 20)
            if not more:
                raise BrowserError("the browser has ended")
            self._unread += more
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method", ""), event.get("params", {})
        self._events.append(event)
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([each.get("value") for each in parameters["args"]]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent" and parameters["type"] != "Document":
            url = parameters["request"]["url"]
            if not url.startswith("data:"):
                self.complaints.append(f"requested {url}")

    def wait_for_event(self, method: str) -> None:
        """Waits until this event has come since the last call."""
        until = time.monotonic() + self._timeout_s
        while not any(event.get("method") == method for event in self._events):
            self._note(self._receive(until))
        self._events.clear()

    def open(
        self, path: Path, *, width: int = 1440, height: int = 1000, scheme: str = "light", motion: str = "reduce"
    ) -> None:
        """Loads a file, in a window of this size, for a reader who prefers this colour scheme and this much motion."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._events.clear()
        self.send("Page.navigate", url=path.absolute().as_uri())
        self.wait_for_event("Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """What JavaScript's expression gives; that of a promise is waited for."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def press(self, key: str, modifiers: int = 0) -> None:
        """A key, pressed and released."""
        more: dict[str, Any] = {"text": key} if len(key) == 1 else {"windowsVirtualKeyCode": _KEY_CODES[key]}
        if key == "Enter":
            more["text"] = "\r"
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, modifiers=modifiers, **more)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """An event of the mouse: ``mouseMoved``, ``mousePressed``, ``mouseReleased``, ``mouseWheel``."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)


@contextmanager
def browser(profile: Path, timeout_s: float = 60.0) -> Iterator[Page]:
    """A Chromium of its own, with its files in ``profile``, and a tab in it. It ends with the context."""
    path = find_chromium()
    if path is None:
        raise BrowserError("no Chromium")
    its_input, commands_fd = os.pipe()
    answers_fd, its_output = os.pipe()
    # Descriptors that are above those that the child gets: else one could be overwritten before it is copied.
    held = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD) for fd in (its_input, its_output)]
    null = os.open(os.devnull, os.O_RDWR)
    actions = [(os.POSIX_SPAWN_DUP2, null, fd) for fd in (0, 1, 2)]
    actions += [(os.POSIX_SPAWN_DUP2, held[0], 3), (os.POSIX_SPAWN_DUP2, held[1], 4)]
    arguments = [path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = os.posix_spawn(path, arguments, os.environ, file_actions=actions, setsid=True)
    for fd in (its_input, its_output, null, *held):
        os.close(fd)
    try:
        yield Page(commands_fd, answers_fd, timeout_s)
    finally:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(commands_fd)
        os.close(answers_fd)
