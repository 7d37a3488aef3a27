"""An asyncio event loop in virtual time.

`loop.time()` is a number. When a real loop would sleep until its next timer, this one advances the number and continues
at once. So a run of hours takes only as long as its Python code. Every `asyncio.sleep`, timeout and deadline in it is
exact to the microsecond, and two runs are identical. The loop allows no input from outside: no socket, no thread.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")


class Deadlock(RuntimeError):
    """All tasks wait, and no timer will wake one of them. The message lists the tasks."""


class _Skip(selectors.SelectSelector):
    """Waits by advancing its loop's time. The loop has no file descriptors, so no descriptor is ever reported."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"at {self.loop.time():.3f} s nothing is due and nothing runs: {_waiting(self.loop)}")
        self.loop.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer. `now`: seconds since the loop was made."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Skip()
        selector.loop = self
        super().__init__(selector)
        self._clock_resolution = 1e-6  # of the base class: timers due within it run together, regardless of rounding

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in a new loop, from time 0. `time.monotonic` returns virtual time meanwhile.

    Raises:
        Deadlock: all tasks wait, and no timer will wake one.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, mock.patch("time.monotonic", runner.get_loop().time):
        return runner.run(main)


def _waiting(loop: VirtualLoop) -> str:
    names = []
    for task in asyncio.all_tasks(loop):
        frames = task.get_stack(limit=1)
        place = f" (line {frames[0].f_lineno} of {frames[0].f_code.co_name})" if frames else ""
        names.append(f"{getattr(task.get_coro(), '__qualname__', task.get_name())}{place}")
    return "; ".join(sorted(names)[:12]) + (f"; and {len(names) - 12} more" if len(names) > 12 else "")
