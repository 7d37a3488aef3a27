"""The master's part of a profiled step: the stacks of all processes while it runs, and a line that says where it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from asyncrl.config.run_dir import PROFILE_DIR
from asyncrl.observe.settings import ProfileConfig
from asyncrl.runtime.process.remarks import remark
from asyncrl.runtime.process.stacks import dump_stacks
from asyncrl.runtime.process.waiting import cancel


@asynccontextmanager
async def profiled(settings: ProfileConfig, run_dir: Path, step: int) -> AsyncIterator[None]:
    """Within it the ranks compute `step`; nothing happens where that is not to be profiled."""
    if step not in settings.steps:
        yield
        return
    folder = run_dir / PROFILE_DIR
    stacks = asyncio.create_task(dump_stacks(folder / f"step-{step}.stacks.txt")) if settings.stacks else None
    try:
        yield
        if stacks is not None:
            await stacks
    finally:
        if stacks is not None:
            await cancel(stacks)
    remark(run_dir, f"profile of step {step}: {folder}")
