"""Stacks of a launch's processes on this host, by py-spy, which stops a process for a moment."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import psutil

from asyncrl.runtime.process.process_tree import LAUNCH_VARIABLE, marked

DUMP_LIMIT_S = 20.0
"""Of one process."""
_TITLE = "asyncrl "
"""Beginning of the titles of a run's processes; those that user code starts have others."""


def py_spy() -> str | None:
    """The program, of this environment or on the path; None if it is not installed."""
    return shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


async def dump_stacks(file: Path) -> None:
    """Write the stacks of all threads of the launch's processes, one process after the other, to `file`."""
    program, launch = py_spy(), os.environ.get(LAUNCH_VARIABLE, "")
    pids = {os.getpid(), *(process.pid for process in marked(launch))} if launch else {os.getpid()}
    parts = []
    for pid in sorted(pids):
        title = _title(pid)
        if pid == os.getpid() or title.startswith(_TITLE):
            parts.append(f"== {title} (process {pid})\n{await _dump(program, pid)}\n")
    await asyncio.to_thread(_write, file, "\n".join(parts))


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8", errors="replace")


def _title(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline()).strip()  # a title is padded
    except psutil.Error:
        return "ended"


async def _dump(program: str | None, pid: int) -> str:
    if program is None:
        return "py-spy is not installed on this host"
    process = await asyncio.create_subprocess_exec(
        *(program, "dump", "--pid", str(pid)), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), DUMP_LIMIT_S)
    except TimeoutError:
        return f"py-spy said nothing within {DUMP_LIMIT_S:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return said.decode(errors="replace").rstrip()
