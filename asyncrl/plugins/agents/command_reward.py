"""Rewards of programs that are agents: by a function or a command, which see what the program left in its folder."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, Final, Protocol

from asyncrl.api import Prompt
from asyncrl.comm.waits import RunningTimeout
from asyncrl.config.plugin_code.import_paths import load_plugin
from asyncrl.config.plugin_code.threads import DaemonThreads
from asyncrl.plugins.agents.command_files import files_of, filled, program_of, remove, texts_of, write

REWARD_S: Final = 60.0
"""Default time limit, in s, of a reward: it runs tests, not an agent."""
_MOST_CALLS: Final = 32
"""Calls of a reward's function that run at a time; and calls that may be abandoned and still run."""
_SHOWN_LINES, _SHOWN_CHARS = 8, 1500

_log = logging.getLogger(__name__)


class RewardFailed(RuntimeError):
    """The reward gave no number, or not in time."""


@dataclass(frozen=True, slots=True)
class RewardCommand:
    """A reward that a command prints: the number in the last line of its output.

    It starts in the program's folder after the program's end, with nothing of the episode still running. Next to that
    folder, in `../reward`, are `output.txt`, what the program printed, `files`, and new folders `home` and `tmp`, its
    HOME and TMPDIR.

    Attributes:
        command: the command, with placeholders of the row.
        files: text by name, with placeholders of the row; or `{path: ...}`, a file or folder to copy.
        timeout_s: time limit, in s.
        failure_reward: reward of an episode for which the command fails; None: the episode fails.
    """

    command: list[str]
    files: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = REWARD_S
    failure_reward: float | None = None


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A reward that a function gives. It is called in a thread, which goes on after the time limit.

    Attributes:
        path: its import path.
        timeout_s: time limit, in s.
        failure_reward: reward of an episode for which the function fails; None: the episode fails.
    """

    path: str
    timeout_s: float = REWARD_S
    failure_reward: float | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended.

    Attributes:
        exit_code: exit code; 128 + the number of a signal that ended it; None if it was ended at its time limit.
        stdout, stderr: the ends of its output.
        truncated: True if there was more output.
        seconds: from start to end.
    """

    exit_code: int | None
    stdout: str
    stderr: str
    truncated: bool
    seconds: float

    def __str__(self) -> str:
        how = "was ended at its time limit" if self.exit_code is None else f"ended with exit code {self.exit_code}"
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()[-_SHOWN_LINES:]
        return f"{how} after {self.seconds:.1f} s" + (": " + "\n".join(lines)[-_SHOWN_CHARS:] if lines else "")


class Run(Protocol):
    """Runs a command in an episode's folder, as `CommandAgent` runs programs."""

    def __call__(
        self, folder: Path, command: Sequence[str], env: Mapping[str, str], limit_s: float | None, own: str = ""
    ) -> Awaitable[Ended]:
        """Return how it ended; `own` stands before its `home` and `tmp` below the folder."""
        ...


class Judge:
    """Gives episodes their reward, by a function or a command.

    Args:
        given: the setting: an import path, or the settings of a `RewardFunction` or a `RewardCommand`.
        run: runs the command.
        on_host: the command runs on this host, where it must exist.

    Raises:
        ValueError: the setting is wrong.
    """

    def __init__(self, given: object, run: Run, *, on_host: bool) -> None:
        self._setting, self._run = _reward_of(given), run
        self._command = self._setting if isinstance(self._setting, RewardCommand) else None
        self._function = _function_of(self._setting.path) if isinstance(self._setting, RewardFunction) else None
        if self._command is not None and on_host:
            program, *arguments = self._command.command
            found = program_of("reward: command[0]", program, None)
            self._command = replace(self._command, command=[found, *arguments])
        self._threads, self._free_threads = DaemonThreads(), asyncio.Semaphore(_MOST_CALLS)
        self._abandoned: set[Future[object]] = set()

    async def reward(self, prompt: Prompt, folder: Path, ended: Ended) -> tuple[float | None, bool]:
        """Return the episode's reward, None to reject it; and whether it is the `failure_reward`.

        Raises:
            RewardFailed: there is no number, and no `failure_reward`.
        """
        await asyncio.to_thread(_mend, folder)
        try:
            if self._function is not None:
                work = partial(self._function, prompt, folder / "work", ended.stdout)
                return _number(await self._called(work, self._setting.timeout_s)), False
            return await self._of_command(folder, ended, prompt.data), False
        except RewardFailed as error:
            if self._setting.failure_reward is None:
                raise
            _log.info("%s; the episode is given failure_reward=%g", error, self._setting.failure_reward)
            return self._setting.failure_reward, True

    async def _called(self, function: Callable[[], object], limit_s: float) -> object:
        """Return what the reward's function returns.

        Raises:
            RewardFailed: it raised, or did not return in time, or too many calls never did.
        """
        self._abandoned = {call for call in self._abandoned if not call.done()}
        if len(self._abandoned) >= _MOST_CALLS:
            raise RewardFailed(f"the reward's function is not called: {_MOST_CALLS} calls of it never returned")
        async with self._free_threads:
            call, limit = self._threads.run(function), RunningTimeout(limit_s)
            try:
                async with limit:
                    return await asyncio.wrap_future(call)
            except Exception as error:
                if limit.expired():
                    said = f"did not return within {limit_s:g} s; its thread continues"
                else:
                    said = f"raised {type(error).__name__}: {error}"
                raise RewardFailed(f"the reward's function {said}") from error
            finally:
                if not call.done():
                    self._abandoned.add(call)

    async def _of_command(self, folder: Path, ended: Ended, row: Mapping[str, Any]) -> float:
        """Return the number that the reward's command prints.

        Raises:
            RewardFailed: it prints none.
        """
        reward = self._command
        assert reward is not None
        await asyncio.to_thread(self._fill_reward, folder, ended, row)
        command = [filled(word, {}, row) for word in reward.command]
        judged = await self._run(folder, command, {}, reward.timeout_s, "reward/")
        last = (judged.stdout.strip().splitlines() or [""])[-1]
        with suppress(ValueError):
            if judged.exit_code == 0 and math.isfinite(number := float(last)):
                return number
        raise RewardFailed(
            f"{command[0]} is to end with exit code 0, and the last line of its output is to be a number; it {judged}"
        )

    def _fill_reward(self, folder: Path, ended: Ended, row: Mapping[str, Any]) -> None:
        """Write what the reward's command reads into a new folder, whatever the program has put in its place."""
        assert self._command is not None
        beside = folder / "reward"
        remove(beside)
        for name in ("", "home", "tmp"):  # in the program's own, Python and others would find what it put there
            (beside / name).mkdir()
        (beside / "output.txt").write_text(ended.stdout, encoding="utf-8")
        for name, content in files_of("reward: files", self._command.files, ()).items():
            write(beside, beside / name, content, {}, row)


def _mend(folder: Path) -> None:
    """Make `work` and the folder itself usable again, whatever the program has done with them."""
    for place in (folder, folder / "work"):
        mode = place.lstat().st_mode if os.path.lexists(place) else 0
        if not stat.S_ISDIR(mode):
            remove(place)
            place.mkdir(mode=0o700)
        elif mode & stat.S_IRWXU != stat.S_IRWXU:
            place.chmod(stat.S_IMODE(mode) | stat.S_IRWXU)


def _reward_of(given: object) -> RewardFunction | RewardCommand:
    """Return the reward that a setting describes.

    Raises:
        ValueError: it describes none.
    """
    if isinstance(given, str):
        return RewardFunction(given)
    if not isinstance(given, Mapping):
        raise ValueError(f"reward={given!r:.80}: give the import path of a function, or {{command: [...]}}")
    try:
        reward = (RewardFunction if "path" in given else RewardCommand)(**given)
    except TypeError as error:
        raise ValueError(f"reward={dict(given)}: {error}") from None
    if reward.timeout_s <= 0:
        raise ValueError(f"reward: timeout_s={reward.timeout_s}: give a positive number of seconds")
    if reward.failure_reward is not None and not math.isfinite(reward.failure_reward):
        raise ValueError(f"reward: failure_reward={reward.failure_reward}: give a finite number, or null")
    if isinstance(reward, RewardFunction):
        return reward
    words = texts_of("reward: command", reward.command, ())
    files_of("reward: files", reward.files, ())
    return replace(reward, command=words)


def _function_of(path: str) -> Callable[[Prompt, Path, str], object]:
    """Return the function at an import path.

    Raises:
        ValueError: it cannot be called so.
    """
    function: Any = load_plugin(path)
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"reward={path!r}: is asynchronous; write a plain `def`, which is called in a thread")
    try:
        takes_output = "output" in inspect.signature(function).parameters
        inspect.signature(function).bind(None, None, **({"output": ""} if takes_output else {}))
    except TypeError as error:
        raise ValueError(f"reward={path!r} is to take (prompt, folder), and perhaps output: {error}") from None
    if takes_output:
        return lambda prompt, folder, output: function(prompt, folder, output=output)
    return lambda prompt, folder, _: function(prompt, folder)


def _number(given: object) -> float | None:
    if isinstance(given, Real) and math.isfinite(given):
        return float(given)
    raise RewardFailed(f"the reward's function returned {given!r:.80}; return a finite number, or None to reject it")
