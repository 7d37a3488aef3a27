"""A server's process tree: its own session, its log forwarded, its death noticed at once, its end complete.

A server may be several processes; SGLang is the HTTP server that we start, a detokenizer, and a scheduler per GPU. They
run below a reaper (`asyncrl.runtime.reaper`), our child, that ends all of them when its standard input, a pipe from
here, is closed: by `stop`, or by the kernel when this process dies. Any of the processes may die by itself. The event
loop is notified of each: of the HTTP server's end by the reaper's exit, of the others' by pidfds, which become readable
when their process ends. Nothing polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import psutil

from asyncrl.runtime import reaper, supervisor

LAST_LINES: Final = 60  # enough for two schedulers that fail at once, each with a traceback
_ERROR: Final = re.compile(r"\b\w*Error\b")
_MAX_LINE_BYTES: Final = 1 << 20  # SGLang logs its 500 settings as one line
_LOG_DRAIN_S: Final = 0.5
_STOP_MARGIN_S: Final = supervisor.GONE_LIMIT_S + 2.0  # for the reaper, after the command's grace period


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Command of a server: `argv`, additions to the environment, and the URL where it will answer."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    url: str


class ForwardedOutput:
    """Output of a command, on its way to `log` line by line, and the lines that explain its end.

    Args:
        redact: a secret that is cut out of the lines; None if there is none.

    Attributes:
        last_lines: the newest lines.
        first_error: first line that names an error; `ProcessTree.watch` clears it.
    """

    def __init__(self, log: logging.Logger, redact: str | None = None) -> None:
        self.log, self._redact = log, redact
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.first_error = ""

    async def forward(self, output: asyncio.StreamReader | None) -> None:
        """Forward `output` until it ends."""
        assert output is not None
        while True:
            try:
                raw = await output.readline()
            except ValueError:  # longer than _MAX_LINE_BYTES; the reader dropped it
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            if self._redact is not None:
                line = line.replace(self._redact, "***")
            self.last_lines.append(line)
            if not self.first_error and _ERROR.search(line):
                self.first_error = line
            self.log.info("%s", line)


class ProcessTree:
    """A command with everything it starts. Use it within one event loop.

    Args:
        argv: the command.
        env: added to this process's environment.
        grace_s: time that the command gets to end after SIGTERM, before everything is killed.
        output: where its output goes.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], *, grace_s: float, output: ForwardedOutput) -> None:
        self._argv, self._env, self._grace_s = tuple(argv), dict(env), grace_s
        self.output = output
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._died: asyncio.Future[str] | None = None
        self._pidfds: list[int] = []

    async def start(self) -> None:
        """Start the command."""
        self._died = asyncio.get_running_loop().create_future()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            supervisor.REAPER,
            str(self._grace_s),
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | self._env,
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        forwarding = asyncio.create_task(self.output.forward(self._process.stdout))
        self._tasks = [forwarding, asyncio.create_task(self._reap(self._process, forwarding))]

    @property
    def root_pid(self) -> int:
        """Process id of the reaper, below which the command runs."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def pid(self) -> int:
        """Process id of the command.

        Raises:
            ProcessLookupError: it has ended.
        """
        assert self._process is not None, "not started"
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._process.pid).children()
            if children:  # the others are orphans that the reaper adopted later
                return min(children, key=psutil.Process.create_time).pid
        raise ProcessLookupError("the command has ended")

    def watch(self, title_prefix: str) -> int:
        """Count the death of any descendant whose title begins with `title_prefix` as the tree's death; return their
        number.
        """
        assert self._process is not None, "not started"
        assert self._process.stdin is not None
        self.output.first_error = ""
        segments = reaper.shared_memory(self._process.pid)
        self._process.stdin.write(b"".join(os.fsencode(segment) + b"\n" for segment in segments))
        loop = asyncio.get_running_loop()
        watched = [p for p in self._descendants() if _title(p).startswith(title_prefix)]
        for process in watched:
            title = f"{_title(process)} (pid {process.pid})"
            try:
                pidfd = os.pidfd_open(process.pid)
            except ProcessLookupError:
                self._report(f"{title} ended")
                continue
            self._pidfds.append(pidfd)
            loop.add_reader(pidfd, self._on_descendant_death, pidfd, title)
        return len(watched)

    async def died(self) -> str:
        """Wait until the command or a watched descendant ends; return what ended."""
        assert self._died is not None, "not started"
        return await asyncio.shield(self._died)

    async def stop(self) -> None:
        """End the whole tree; return once all of it has ended. Idempotent."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), self._grace_s + _STOP_MARGIN_S)
        except TimeoutError:
            self.output.log.error("the reaper (pid %d) did not end; killing its process group", self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for pidfd in self._pidfds:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _reap(self, process: asyncio.subprocess.Process, forwarding: asyncio.Task[None]) -> None:
        code = await process.wait()
        await asyncio.wait({forwarding}, timeout=_LOG_DRAIN_S)
        forwarding.cancel()
        # the reaper reports 128 + n for signal n
        self._report(f"the server {reaper.describe_end(128 - code if code > 128 else code)}")

    def _on_descendant_death(self, pidfd: int, title: str) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        self._report(f"{title} ended")

    def _report(self, reason: str) -> None:
        if self._died is not None and not self._died.done():
            self._died.set_result(reason)

    def _descendants(self) -> list[psutil.Process]:
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(" ".join(process.cmdline()).split())  # a changed title is padded with blanks
    return ""
