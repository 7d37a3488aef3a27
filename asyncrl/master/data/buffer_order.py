"""The user's order of the buffer (`buffer.order.path`): ranks of the rollouts that wait.

The function is the user's, so a step does not depend on it: where it fails, or takes longer than
`buffer.order.timeout_s` for all that wait, that step takes the oldest tokens first, as without it, and the log says
why. It runs in a daemon thread, beside the master's event loop. One that hangs cannot be ended, so it is not called
again before it has returned.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from asyncrl.api import ReadyRollout
from asyncrl.config.import_paths import PluginError, load_plugin
from asyncrl.config.setting import ConfigError
from asyncrl.master.settings import BufferOrderConfig
from asyncrl.trainer.messages import RolloutRecord

_log = logging.getLogger(__name__)


class BufferOrderFailed(RuntimeError):
    """The user's order gave no ranks; the message says which function, and why."""


class BufferOrder:
    """The order that the settings name.

    Attributes:
        failures: steps that took the oldest tokens first because the function failed or was too slow.

    Raises:
        ConfigError: the path names nothing that can be called.
    """

    def __init__(self, config: BufferOrderConfig) -> None:
        self._path, self._limit_s = config.path, config.timeout_s
        self._function = _function(config)
        self._busy: asyncio.Future[dict[str, float]] | None = None
        self.failures = 0

    async def ranks(self, records: Iterable[RolloutRecord], version: int) -> dict[str, float]:
        """Ranks by rollout id of the `records` that wait for the step at `version`; none: the buffer's own order."""
        if self._function is None:
            return {}
        try:
            return await self._asked(self._function, [_ready(record, version) for record in records])
        except BufferOrderFailed as error:
            self.failures += 1
            _log.warning("%s; oldest tokens first in step %d", error, version + 1, exc_info=error.__cause__)
            return {}

    async def _asked(
        self, function: Callable[[ReadyRollout], float], ready: Sequence[tuple[str, ReadyRollout]]
    ) -> dict[str, float]:
        if self._busy is not None and not self._busy.done():
            raise BufferOrderFailed(f"buffer.order {self._path} has not returned from an earlier step's call")
        self._busy = _in_daemon_thread(lambda: {name: float(function(rollout)) for name, rollout in ready})
        try:
            ranks = await asyncio.wait_for(asyncio.shield(self._busy), self._limit_s)
        except TimeoutError as error:
            if self._busy.done():  # it is one of the user's own
                raise BufferOrderFailed(f"buffer.order {self._path} failed: {error!r}") from error
            raise BufferOrderFailed(
                f"buffer.order {self._path} took longer than buffer.order.timeout_s={self._limit_s:g} for "
                f"{len(ready)} rollouts; make it quicker, or raise the limit"
            ) from None
        except Exception as error:
            raise BufferOrderFailed(f"buffer.order {self._path} failed: {error!r}") from error
        if (wrong := next((rank for rank in ranks.values() if not math.isfinite(rank)), None)) is not None:
            raise BufferOrderFailed(f"buffer.order {self._path} returned {wrong}; a rank is a finite number")
        return ranks


def _function(config: BufferOrderConfig) -> Callable[[ReadyRollout], float] | None:
    if not config.path:
        return None
    try:
        found = load_plugin(config.path)
    except PluginError as error:
        raise ConfigError(f"buffer.order.path={error}") from error
    if not callable(found):
        raise ConfigError(f"buffer.order.path={config.path!r}: it is a {type(found).__name__}; name a function")
    return functools.partial(found, **config.args)


def _in_daemon_thread(work: Callable[[], dict[str, float]]) -> asyncio.Future[dict[str, float]]:
    """Begin `work` in a thread that the process does not wait for at its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[dict[str, float]] = loop.create_future()
    future.add_done_callback(lambda done: done.exception())  # nobody may be there to hear of it

    def run() -> None:
        ranks: dict[str, float] = {}
        failure: BaseException | None = None
        try:
            ranks = work()
        except Exception as error:
            failure = error
        except BaseException as error:  # SystemExit, say, which ends the step's order and no more
            failure = RuntimeError(f"raised {type(error).__name__}")

        with suppress(RuntimeError):  # the loop is closed: the run is over
            loop.call_soon_threadsafe(_resolve, future, ranks, failure)

    threading.Thread(target=run, name="buffer-order", daemon=True).start()
    return future


def _resolve(future: asyncio.Future[dict[str, float]], ranks: dict[str, float], failure: BaseException | None) -> None:
    if isinstance(failure, StopIteration):  # which no future can hold
        failure = RuntimeError("raised StopIteration")
    if failure is None:
        future.set_result(ranks)
    else:
        future.set_exception(failure)


def _ready(record: RolloutRecord, version: int) -> tuple[str, ReadyRollout]:
    age = version - record.oldest_version if record.generated_tokens else 0
    return record.rollout_id, ReadyRollout(
        record.prompt_id, record.order, age, record.rewards, record.generated, record.truncated, dict(record.metrics)
    )
