"""The user's order of the buffer (`buffer.order.path`): ranks of the rollouts that wait.

The function is the user's, so a step does not depend on it: where it fails, that step takes the oldest tokens first,
as without it, and the log says why.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable

from asyncrl.api import ReadyRollout
from asyncrl.config.import_paths import PluginError, load_plugin
from asyncrl.config.setting import ConfigError
from asyncrl.master.settings import BufferOrderConfig
from asyncrl.trainer.messages import RolloutRecord

_log = logging.getLogger(__name__)

Ranks = Callable[[Iterable[RolloutRecord], int], dict[str, float]]
"""Ranks by rollout id of the records that wait for the step at a version."""


def buffer_order(config: BufferOrderConfig) -> Ranks:
    """The order that the settings name.

    Raises:
        ConfigError: the path names nothing that can be called.
    """
    if not config.path:
        return oldest_first
    try:
        found = load_plugin(config.path)
    except PluginError as error:
        raise ConfigError(f"buffer.order.path={error}") from error
    if not callable(found):
        raise ConfigError(f"buffer.order.path={config.path!r}: it is a {type(found).__name__}; name a function")
    return functools.partial(_ranked, functools.partial(found, **config.args), config.path)


def oldest_first(records: Iterable[RolloutRecord], version: int) -> dict[str, float]:
    """No ranks: the buffer's own order holds."""
    return {}


def _ranked(
    function: Callable[[ReadyRollout], float], path: str, records: Iterable[RolloutRecord], version: int
) -> dict[str, float]:
    try:
        ranks = {record.rollout_id: float(function(_ready(record, version))) for record in records}
    except Exception as error:
        _log.warning("buffer.order %s failed, oldest tokens first in step %d", path, version + 1, exc_info=error)
        return {}
    if (wrong := next((rank for rank in ranks.values() if not math.isfinite(rank)), None)) is not None:
        _log.warning("buffer.order %s returned %s, oldest tokens first in step %d", path, wrong, version + 1)
        return {}
    return ranks


def _ready(record: RolloutRecord, version: int) -> ReadyRollout:
    age = version - record.oldest_version if record.generated_tokens else 0
    return ReadyRollout(
        record.prompt_id, record.order, age, record.rewards, record.generated, record.truncated, dict(record.metrics)
    )
