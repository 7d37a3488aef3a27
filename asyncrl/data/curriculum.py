"""Curriculum by measured success: prompts that are too easy or too hard now are left out of some epochs.

Each rollout measures the success of its prompt: the share of right answers in the group. If a row's newest measurement,
in epoch m, is outside `low` to `high`, the row is skipped in epochs m + 1 to m + `skip_epochs`: at its turn its prompt
is dropped for good as `curriculum`, without a rollout. In epoch m + skip_epochs + 1 it is used and measured again. So a
row that stays outside is used once in `skip_epochs` + 1 epochs.

With `least_weight` w0 below 1, prompts are weighted by difficulty besides: a row of success s is used in a share of
1 - (1 - w0) (2 s - 1)^2 of the later epochs, drawn for each row and epoch by a hash. So no choice needs to be kept.

Only the measurements decide which prompts are skipped, so a run that resumes with those of its checkpoint makes the
same decisions. If a dataset has fewer rows than running rollouts, a measurement may arrive after the row's turn in a
later epoch. It counts from the epoch after that.

Example, low 0.1, high 0.9, skip_epochs 2: a row with success 1.0 in epoch 0 is skipped in 1 and 2; measured 0.5 in
epoch 3, it is drawn in epoch 4.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from asyncrl.api.generation import seed_from
from asyncrl.config.plugin_code.import_paths import PluginError, load_plugin
from asyncrl.config.plugin_code.interfaces import call_problems
from asyncrl.config.plugin_code.threads import DaemonThreads, plain_state
from asyncrl.config.setting import ConfigError
from asyncrl.data.prompt_queue import parse_prompt_id
from asyncrl.data.settings import CurriculumConfig

CALL_LIMIT_S = 10.0
"""Longest time, in s, for which a call of a user's curriculum may hold the event loop. Its answer decides what happens
next, so the loop waits for it.
"""
_log = logging.getLogger(__name__)


class CurriculumFailed(RuntimeError):
    """A call of the user's curriculum took too long; the message names the call."""


class Curriculum:
    """Decides by measured success which rows an epoch leaves out. Pure state.

    Args:
        low, high: range of success, both ends included, that keeps a row in every epoch.
        skip_epochs: number of epochs in which a row outside is left out.
        least_weight: share of the epochs in which a row of success 0 or 1 is used.
        state: result of an earlier curriculum's `state`.
    """

    def __init__(
        self,
        low: float,
        high: float,
        skip_epochs: int,
        state: Iterable[Sequence[float]] = (),
        least_weight: float = 1.0,
    ) -> None:
        self._low, self._high, self._skip_epochs, self._least = low, high, skip_epochs, least_weight
        self._newest: dict[int, tuple[int, float]] = {
            int(row): (int(epoch), float(success)) for row, epoch, success in state
        }

    def measured(self, prompt_id: str, success: float) -> None:
        """Record the `success` (0 to 1) of a rollout of `prompt_id`.

        An older epoch's value does not replace a newer one's.
        """
        parsed = parse_prompt_id(prompt_id)
        if parsed is None:  # a user's own stream, whose rows have no epochs
            return
        epoch, row = parsed
        if row not in self._newest or self._newest[row][0] <= epoch:
            self._newest[row] = (epoch, success)

    def skips(self, prompt_id: str) -> bool:
        """True if `prompt_id` is left out of its epoch."""
        parsed = parse_prompt_id(prompt_id)
        if parsed is None or (newest := self._newest.get(parsed[1])) is None:
            return False
        epoch, success = newest
        if parsed[0] <= epoch:
            return False
        outside = not self._low <= success <= self._high and parsed[0] <= epoch + self._skip_epochs
        return outside or _draw(*parsed) >= 1 - (1 - self._least) * (2 * success - 1) ** 2

    def state(self) -> Any:
        """Return row, epoch and success of the newest measurements, for JSON."""
        return [(row, epoch, success) for row, (epoch, success) in sorted(self._newest.items())]


def _draw(epoch: int, row: int) -> float:
    """Return a number from 0 to below 1 for a row in an epoch, the same in every process."""
    return seed_from("curriculum", epoch, row) / 2**31


class OwnCurriculum(Curriculum):
    """A user's curriculum, named by `dataset.curriculum.path` (`asyncrl.api.Curriculum`).

    Its methods replace all of the built-in one's. They raise `CurriculumFailed` if the user's take longer than
    `CALL_LIMIT_S`. A call that hangs cannot be ended, so no other is made before it has returned.

    Raises:
        ConfigError: it cannot be constructed.
    """

    def __init__(self, path: str, args: Mapping[str, Any]) -> None:
        self._path = path
        self._threads, self._running = DaemonThreads(), Future[Any]()
        self._running.set_result(None)
        try:
            found = load_plugin(path)
        except PluginError as error:
            raise ConfigError(f"dataset.curriculum.path={error}") from error
        if hasattr(found, "rests"):
            raise ConfigError(f"dataset.curriculum.path={path!r}: its method `rests` is called `skips` now; rename it")
        if problems := list(call_problems("dataset.curriculum", path, found, args)):
            raise ConfigError(problems[0])
        try:
            self._own = found(**args)
        except Exception as error:  # a user's constructor may raise anything
            raise ConfigError(f"dataset.curriculum.path={path!r} with args {dict(args)}: {error!r}") from error

    def measured(self, prompt_id: str, success: float) -> None:
        if (parsed := parse_prompt_id(prompt_id)) is not None:
            self._call("measured", parsed[1], parsed[0], success)

    def skips(self, prompt_id: str) -> bool:
        parsed = parse_prompt_id(prompt_id)
        return parsed is not None and bool(self._call("skips", parsed[1], parsed[0]))

    def state(self) -> Any:
        return {"path": self._path, "state": plain_state(self._call("state"))}

    def restore(self, state: Any) -> None:
        """Continue from a result of `state` of the same class."""
        self._call("restore", state)

    def check(self) -> None:
        """Check that it accepts a measurement, answers, and can be restored from its state.

        Raises:
            ConfigError: a call fails; the message names the call.
        """
        call = "measured(0, 0, 0.5)"
        try:
            self._call("measured", 0, 0, 0.5)
            call = "skips(0, 1)"
            skips = self._call("skips", 0, 1)
            if not isinstance(skips, bool):
                raise TypeError(f"it returned {skips!r}, which is no bool")
            call = "state()"
            state = plain_state(self._call("state"))
            call = "restore(state)"
            self._call("restore", state)
            if plain_state(self._call("state")) != state or self._call("skips", 0, 1) is not skips:
                raise ValueError("it is another one afterwards")
        except Exception as error:  # a user's methods may raise anything
            raise ConfigError(f"dataset.curriculum.path={self._path!r}: {call} failed: {error!r}") from error

    def _call(self, name: str, *args: Any) -> Any:
        """Call the user's method `name` in a thread, and wait for its result."""
        call = f"dataset.curriculum.path={self._path!r}: {name}"
        if not self._running.done():
            raise CurriculumFailed(f"{call} is not called: an earlier call has not returned")
        self._running = self._threads.run(lambda: getattr(self._own, name)(*args))
        try:
            return self._running.result(CALL_LIMIT_S)
        except TimeoutError:
            if self._running.done():  # it is one of the user's own
                raise
            raise CurriculumFailed(f"{call} did not return within {CALL_LIMIT_S:g} s") from None


def make_curriculum(settings: CurriculumConfig, state: Any = ()) -> Curriculum:
    """Build the curriculum of the settings; it continues from `state`, unless that belongs to another curriculum.

    Raises:
        ConfigError: the user's class cannot be made.
    """
    before = state["path"] if isinstance(state, Mapping) else ""
    if state and before != settings.path:
        _log.warning("dataset.curriculum.path=%r begins anew: what was kept is of %r", settings.path, before)
        state = ()
    if not settings.path:
        return Curriculum(settings.low, settings.high, settings.skip_epochs, state, settings.least_weight)
    own = OwnCurriculum(settings.path, settings.args)
    if state:
        own.restore(state["state"])
    return own
