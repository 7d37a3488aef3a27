"""Dump stacks of a launch's processes on this host with py-spy, which stops a process for a moment."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from asyncrl.comm.waits import TOOL_S
from asyncrl.config.run_dir import PROFILE_DIR
from asyncrl.observe.settings import ProfileConfig
from asyncrl.runtime.process.waiting import cancel
from asyncrl.runtime.run_log import notice
from asyncrl.runtime.supervisor import LAUNCH_VARIABLE, marked

_log = logging.getLogger(__name__)
_TITLE = "asyncrl "
"""Beginning of the titles of a run's processes; those that user code starts have others."""


def py_spy() -> str | None:
    """Return the path of py-spy, in this environment or on PATH; None if it is not installed."""
    return shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


@asynccontextmanager
async def profiled(settings: ProfileConfig, run_dir: Path, step: int) -> AsyncIterator[None]:
    """Profile `step`, which the ranks compute within the block."""
    folder = run_dir / PROFILE_DIR
    stacks = asyncio.create_task(dump_stacks(folder / f"step-{step}.stacks.txt")) if settings.stacks else None
    try:
        yield
        if stacks is not None:
            await stacks
    finally:
        if stacks is not None:
            await cancel(stacks)
    notice(run_dir, f"profile of step {step}: {folder}")


async def dump_stacks(file: Path) -> None:
    """Write the stacks of all threads of the launch's processes, one process after the other, to `file`."""
    program, launch = py_spy(), os.environ.get(LAUNCH_VARIABLE, "")
    pids = {os.getpid(), *(process.pid for process in marked(launch))} if launch else {os.getpid()}
    parts, ends_at = [], time.monotonic() + 3 * TOOL_S
    for pid in sorted(pids):
        if time.monotonic() > ends_at:
            parts.append(f"the others are left out: {3 * TOOL_S:g} s are over\n")
            break
        title = _title(pid)
        if pid == os.getpid() or title.startswith(_TITLE):
            parts.append(f"== {title} (process {pid})\n{await _dump(program, pid)}\n")
    try:
        await asyncio.to_thread(_write, file, "\n".join(parts))
    except OSError as error:  # a full disk, say; the step is trained all the same
        _log.warning("the stacks could not be written: %s", error)


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
    pipe, joined = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    try:
        process = await asyncio.create_subprocess_exec(program, "dump", "--pid", str(pid), stdout=pipe, stderr=joined)
    except OSError as error:
        return f"py-spy did not start: {error}"
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TOOL_S)
    except TimeoutError:
        return f"py-spy said nothing within {TOOL_S:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode(errors="replace").rstrip()
