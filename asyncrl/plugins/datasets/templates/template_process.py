"""A process that renders chat templates, so that the kernel can limit their time and memory.

A template comes with a model's folder and is as untrusted as data: it may loop for hours, or make a text larger than
memory. Each process that renders has one such child, started with its first template. Templates and conversations are
sent to it, and text comes back, at about 0.06 ms per rendering.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from asyncrl.plugins.datasets.templates.template_inside import (
    HEADER,
    LENGTH,
    NO_TEMPLATE,
    REFUSED,
    TOO_LARGE,
    TemplateRequest,
)

CPU_LIMIT_S: Final = 5.0
"""CPU limit of one rendering, in s; a usual one takes a ten-thousandth of it."""
WALL_LIMIT_S: Final = 120.0
"""Longest wait, in s, for one rendering, whose process may be stopped or starved on a busy machine."""
END_LIMIT_S: Final = 5.0
"""Longest time, in s, that the process has for its own end, once its pipes are closed; then it is killed."""
MEMORY_LIMIT_BYTES: Final = 1 << 30
TEXT_LIMIT_CHARS: Final = 64_000_000


class TemplateRefusal(ValueError):
    """The template refuses the conversation, or is not a valid template."""


class TemplateLimit(RuntimeError):
    """A template takes more time or memory than any conversation needs: it is broken or hostile."""


class TemplateProcess:
    """Starts the process on first use, and again after a template ended it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def rendered(self, source: str, variables: Mapping[str, Any] | None, now: datetime) -> str:
        """Render the template `source` with `variables` at the time `now`; without variables it is only parsed.

        Raises:
            TemplateRefusal: the template fails, or is not valid.
            TemplateLimit: it takes more than the limits.
        """
        try:
            request = _encoder.encode(TemplateRequest(source, None if variables is None else dict(variables), now))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TemplateRefusal(
                f"gets a value that is not plain data ({error}); messages, tools and dataset.chat_template_args may "
                "hold text, numbers of 64 bits, true, false, null, lists and maps"
            ) from None
        with self._lock:
            kind, text = self._answer(request)
        if kind == TOO_LARGE:
            raise TemplateLimit(
                f"makes more than {TEXT_LIMIT_CHARS} characters of one conversation, or needs more than "
                f"{MEMORY_LIMIT_BYTES >> 20} MB for it"
            )
        if kind == NO_TEMPLATE:
            raise TemplateRefusal(f"is no Jinja template ({text})")
        if kind == REFUSED:
            raise TemplateRefusal(f"refuses it ({text})")
        return text

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            if self._process is not None:
                _ended(self._process)
                self._process = None

    def _answer(self, request: bytes) -> tuple[bytes, str]:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = _started()
        until = time.monotonic() + WALL_LIMIT_S
        try:
            _send(_pipe(process.stdin), LENGTH.pack(len(request)), until)
            _send(_pipe(process.stdin), request, until)
            kind, length = HEADER.unpack(_read(_pipe(process.stdout), HEADER.size, until))
            text = _read(_pipe(process.stdout), length, until)
        except TimeoutError:
            self._process = None
            process.kill()
            _ended(process)
            raise TemplateLimit(f"needs more than {WALL_LIMIT_S:g} s for one conversation") from None
        except (BrokenPipeError, EOFError):
            self._process = None
            code = _ended(process)
            if code == -signal.SIGPROF:
                raise TemplateLimit(f"needs more than {CPU_LIMIT_S:g} s of CPU time for one conversation") from None
            raise TemplateLimit(f"ended the process that renders it (exit code {code})") from None
        return kind, text.decode("utf-8", errors="surrogatepass")

    def _leave_to_parent(self) -> None:
        """Release the process in a forked child. The parent ends the process by closing its input."""
        self._lock = threading.Lock()
        process, self._process = self._process, None
        if process is not None:
            _pipe(process.stdin).close()
            _pipe(process.stdout).close()
            process.returncode = 0  # the process is not a child of this one


def _started() -> subprocess.Popen[bytes]:
    inside = Path(__file__).with_name("template_inside.py")
    limits = [str(limit) for limit in (CPU_LIMIT_S, MEMORY_LIMIT_BYTES, TEXT_LIMIT_CHARS)]
    command = [sys.executable, "-P", str(inside), *limits]
    process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    os.set_blocking(_pipe(process.stdin).fileno(), False)  # a write beyond the pipe's space would have no limit
    return process


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of the process, which its closed pipes cause, or kill it; return its exit status."""
    _pipe(process.stdin).close()
    _pipe(process.stdout).close()
    try:
        return process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _send(pipe: IO[bytes], content: bytes, until: float) -> None:
    unsent = memoryview(content)
    while unsent:
        _wait(pipe, select.POLLOUT, until)
        unsent = unsent[pipe.write(unsent) or 0 :]  # None: no space yet


def _read(pipe: IO[bytes], size: int, until: float) -> bytes:
    """Read exactly `size` bytes; raise EOFError if there are fewer."""
    chunks = bytearray()
    while len(chunks) < size:
        _wait(pipe, select.POLLIN, until)
        chunk = pipe.read(size - len(chunks))
        if not chunk:
            raise EOFError
        chunks += chunk
    return bytes(chunks)


def _wait(pipe: IO[bytes], event: int, until: float) -> None:
    """Wait until the pipe is ready; raise TimeoutError after `until`."""
    ready = select.poll()
    ready.register(pipe, event)
    if not ready.poll(1000.0 * max(0.0, until - time.monotonic())):
        raise TimeoutError


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "asked for"
    return stream


_encoder = msgspec.msgpack.Encoder()
RENDERING: Final = TemplateProcess()
"""The template process of this Python process."""
atexit.register(RENDERING.close)
