"""The master's part of a profiled step: it samples the stacks of all processes meanwhile, and logs where they are."""

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
    """Profile `step`, which the ranks compute within the block, if it is to be profiled."""
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
