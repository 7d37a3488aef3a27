"""Where a run stands when a master begins: with its ranks, in the last step that is kept, in a checkpoint, or nowhere.

A master that follows one that died asks the ranks first. Each has the master's state of the step whose end was kept
last. Where all are between two steps, after the same one, the run stands there, and nothing is loaded. Ranks that begin
too load the last step, or else the newest checkpoint. In any other case all of the trainer's side has to begin again
(`RestartTogether`).
"""

from __future__ import annotations

import asyncio
import logging
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.comm.request_reply.client import PeerGone
from asyncrl.master.ranks import Ranks, Stalled
from asyncrl.master.saving import KeptSteps
from asyncrl.runtime.worker import RestartTogether
from asyncrl.trainer.messages import LoadCheckpoint, LookIntoStep, TakeUp

_log = logging.getLogger(__name__)

TAKE_UP_LIMIT_S = 60.0
"""So long what a master before this one had asked for between two steps may take the ranks: copies of their state."""


class Source(Enum):
    """Where the master's state was found."""

    ranks = auto()
    last_step = auto()
    checkpoint = auto()
    """Or nowhere: the run is at its beginning."""


class Found(NamedTuple):
    """The master's state, None at the beginning of the run, and where it was."""

    state: dict[str, Any] | None
    source: Source


async def find(ranks: Ranks, steps: KeptSteps, checkpoints: Path, announced: int) -> Found:
    """Where the run stands; the ranks have that state when this returns.

    Args:
        checkpoints: their folder.
        announced: the version that others know.

    Raises:
        RestartTogether: nobody can go on with the ranks as they are, or the last step is lost.
    """
    if (state := await _of_ranks(ranks)) is not None:
        _log.info("the ranks stand between two steps, and keep what they have")
        return Found(state, Source.ranks)
    if (state := await steps.load(announced)) is not None:
        return Found(state, Source.last_step)
    loaded = await ranks.load(LoadCheckpoint(str(checkpoints)))
    return Found(loaded[0].master_state, Source.checkpoint)


async def _of_ranks(ranks: Ranks) -> dict[str, Any] | None:
    """The state that a master before this one left with every rank; None where all of them begin too.

    Raises:
        RestartTogether: they are in a step, stand after different ones, or one does not answer.
    """
    try:
        async with asyncio.timeout(TAKE_UP_LIMIT_S):
            if any(rank.in_step for rank in await ranks.all(LookIntoStep())):
                raise RestartTogether("the ranks are in a step that has not ended")
            standing = await ranks.all(TakeUp(ranks.master))
    except (TimeoutError, Stalled, PeerGone) as error:
        raise RestartTogether(f"a rank does not say where it stands: {error!r}") from error
    states = [rank.master_state for rank in standing]
    versions = {None if state is None else state["version"] for state in states}
    if len(versions) > 1 or any(rank.in_step for rank in standing):
        raise RestartTogether(f"the ranks are in a step, or not after the same one: {versions}")
    return states[0]
