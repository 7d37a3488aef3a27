"""A warning if filters drop nearly every group, so that no step can begin.

Under dynamic sampling (`rollout.filters`) a group whose rewards are all equal is not trained, and another prompt takes
its place. If the reward is always the same, rollouts are made and dropped without end. Nothing fails, and no row of
metrics is written that could show it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from asyncrl.comm.ended_rollouts.drop_reasons import is_filter_reason
from asyncrl.comm.http.calls import HttpError
from asyncrl.comm.waits.limits import ASK_S
from asyncrl.manager.client import ManagerClient, ManagerGone
from asyncrl.observe.metrics.learning import ADVICE

LEAST_GROUPS: Final = 64
"""Warn if filters drop at least so many groups between two steps ..."""
LEAST_KEPT: Final = 0.05
"""... and keep less than this share of all groups meanwhile."""
_log = logging.getLogger(__name__)


class FilteredOut:
    """Finds that filters drop nearly all groups between two steps.

    Args:
        batch_size: number of groups of a step.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._version: int | None = None
        self._before: dict[str, int] = {}
        self._warned = False

    def take(self, version: int, kept: int, dropped: Mapping[str, int]) -> str | None:
        """Process the state of the run; return a warning, at most once between two steps.

        Args:
            version: the policy's version.
            kept: number of groups that wait to be trained.
            dropped: number of groups dropped in the run, by reason, from all processes.
        """
        by_filter = {reason: count for reason, count in dropped.items() if is_filter_reason(reason)}
        if version != self._version:
            self._version, self._before, self._warned = version, by_filter, False
        counts = {reason: count - self._before.get(reason, 0) for reason, count in by_filter.items()}
        total = sum(counts.values())
        if total < LEAST_GROUPS or kept >= LEAST_KEPT * (kept + total):
            return None
        if self._warned:
            return None
        self._warned = True
        shown = sorted((reason.partition(": ")[2], count) for reason, count in counts.items() if count)
        reasons = ", ".join(f"{count} {reason}" for reason, count in shown)
        return (
            f"WARNING: since step {version} filters dropped {total} groups ({reasons}) and kept {kept} of the "
            f"{self._batch_size} that a step needs; {ADVICE}, or change rollout.filters. The run goes on, without a "
            f"step until there are enough"
        )


async def watch_filters(
    filtered: FilteredOut,
    manager: ManagerClient,
    version: Callable[[], int],
    kept: Callable[[], int],
    tell: Callable[[str], None],
) -> NoReturn:
    """Check every `ASK_S` seconds how many groups filters drop, and call `tell` with a warning."""
    while True:
        await asyncio.sleep(ASK_S)
        try:
            status = await manager.status()
        except (HttpError, ManagerGone) as error:
            _log.info("it is not known what filters drop: %s", error)
            continue
        if not status.rebuilt:
            continue
        if (warning := filtered.take(version(), kept(), status.dropped)) is not None:
            tell(warning)
