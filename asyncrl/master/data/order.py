"""Optional: the user's own order of the waiting rollouts, `buffer.order.path`.

A step does not depend on the user's function: if it fails, or takes longer than `buffer.order.timeout_s` for all
waiting rollouts, the step does without it, and the log says why. It runs in a daemon thread beside the master's event
loop. A call that hangs cannot be ended, so the function is not called again before it has returned. An object of a
user's class may have a state, which is saved in every checkpoint.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from asyncrl.api import ReadyRollout
from asyncrl.config.plugin_code.import_paths import PluginError, load_plugin
from asyncrl.config.plugin_code.interfaces import call_problems
from asyncrl.config.plugin_code.threads import DaemonThreads, plain_state
from asyncrl.config.setting import ConfigError
from asyncrl.master.settings import BufferOrderConfig
from asyncrl.trainer.messages import RolloutRecord

_log = logging.getLogger(__name__)
T = TypeVar("T")


class BufferOrderFailed(RuntimeError):
    """The user's order returned no ranks; the message says which function, and why."""


class ConfiguredOrder:
    """The order that `buffer.order.path` names.

    Attributes:
        failures: steps that did without the function because it failed or was too slow.

    Raises:
        ConfigError: the path names nothing that can be called.
    """

    def __init__(self, config: BufferOrderConfig) -> None:
        self._path, self._limit_s = config.path, config.timeout_s
        self._own = _made(config)
        self._threads = DaemonThreads()
        self._busy: asyncio.Future[Any] | None = None
        self._state: Any = self._new_state()
        self.failures = 0

    def metrics(self) -> dict[str, float]:
        """Return the number of failures so far."""
        return {"rollout/order_failed": float(self.failures)}

    async def ranks(self, records: Iterable[RolloutRecord], version: int) -> dict[str, float]:
        """Return ranks, by rollout id, of the `records` that wait for the step at `version`; empty: none is ranked."""
        own = self._own
        ready = [_ready(record, version) for record in records]
        try:
            found = await self._asked(lambda: [float(own(rollout)) for _, rollout in ready], f"{len(ready)} rollouts")
            if (wrong := next((rank for rank in found if not math.isfinite(rank)), None)) is not None:
                raise BufferOrderFailed(f"buffer.order {self._path} returned {wrong}; a rank is a finite number")
        except BufferOrderFailed as error:
            self.failures += 1
            _log.warning("%s; step %d does without it", error, version + 1, exc_info=error.__cause__)
            return {}
        return {name: rank for (name, _), rank in zip(ready, found, strict=True)}

    async def trained(self, records: Iterable[RolloutRecord], version: int) -> None:
        """Report the `records` that the step at `version` takes to the user's order, if that has a method `trained`."""
        report = getattr(self._own, "trained", None)
        if report is None:
            return
        ready = [rollout for _, rollout in (_ready(record, version) for record in records)]
        try:
            await self._asked(lambda: report(ready), f"{len(ready)} rollouts")
        except BufferOrderFailed as error:
            self.failures += 1
            _log.warning("%s; step %d was not reported to it", error, version + 1, exc_info=error.__cause__)

    def state(self) -> Any:
        """Return its state after its last call, with its name, for a checkpoint; None if it has no state."""
        return None if self._state is None else {"path": self._path, "state": self._state}

    async def restore(self, state: Any) -> None:
        """Continue from `state`, unless that belongs to another order.

        Raises:
            BufferOrderFailed: the user's order failed to load its state, or took too long.
        """
        if state is None or not hasattr(self._own, "restore"):
            return
        if state["path"] != self._path:
            _log.warning("buffer.order.path=%r begins anew: what was kept is of %r", self._path, state["path"])
            return
        await self._asked(lambda: self._own.restore(state["state"]), "restore")

    async def _asked(self, work: Callable[[], T], what: str) -> T:
        """Run `work` in a thread, and keep the state after it; `what` names it in messages."""
        if self._busy is not None and not self._busy.done():
            raise BufferOrderFailed(f"buffer.order {self._path} has not returned from an earlier step's call")
        self._busy = asyncio.wrap_future(self._threads.run(lambda: (work(), self._new_state())))
        self._busy.add_done_callback(lambda done: done.exception())  # nothing may await it any more
        try:
            found: T
            found, self._state = await asyncio.wait_for(asyncio.shield(self._busy), self._limit_s)
        except TimeoutError as error:
            if self._busy.done():  # it is one of the user's own
                raise BufferOrderFailed(f"buffer.order {self._path} failed for {what}: {error!r}") from error
            raise BufferOrderFailed(
                f"buffer.order {self._path} took longer than buffer.order.timeout_s={self._limit_s:g} for "
                f"{what}; make it quicker, or raise the limit"
            ) from None
        except Exception as error:
            raise BufferOrderFailed(f"buffer.order {self._path} failed for {what}: {error!r}") from error
        return found

    def _new_state(self) -> Any:
        """Return a copy of its state as JSON values; None if it has none."""
        state = getattr(self._own, "state", None)
        return None if state is None else plain_state(state())


def _made(config: BufferOrderConfig) -> Any:
    try:
        found = load_plugin(config.path)
    except PluginError as error:
        raise ConfigError(f"buffer.order.path={error}") from error
    is_class = isinstance(found, type)
    if problems := list(call_problems("buffer.order", config.path, found, config.args, positional=int(not is_class))):
        raise ConfigError(problems[0])
    if not is_class:
        return functools.partial(found, **config.args)
    try:
        made = found(**config.args)
        if state := getattr(made, "state", None):
            plain_state(state())
    except Exception as error:  # a user's constructor may raise anything
        raise ConfigError(f"buffer.order.path={config.path!r} with args {config.args}: {error!r}") from error
    if not callable(made) or hasattr(made, "state") != hasattr(made, "restore"):
        raise ConfigError(
            f"buffer.order.path={config.path!r}: its objects need __call__(rollout), and state() and restore(state) "
            "both or neither"
        )
    return made


def _ready(record: RolloutRecord, version: int) -> tuple[str, ReadyRollout]:
    age = version - record.oldest_version if record.generated_tokens else 0
    return record.rollout_id, ReadyRollout(
        record.prompt_id, record.order, age, record.rewards, record.generated, record.truncated, dict(record.metrics)
    )
