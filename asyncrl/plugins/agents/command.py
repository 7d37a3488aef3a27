"""Programs as agents: an episode is one run of a command in a folder of its own, whose result is rewarded.

    agent:
      path: asyncrl.plugins.agents.command:CommandAgent
      args:
        command: [my-agent, --model, policy, '{row.prompt}']
        env: {OPENAI_BASE_URL: '{base_url}', OPENAI_API_KEY: '{api_key}'}
        reward: my_reward.py:of_folder          # def of_folder(prompt, folder) -> float

The episode's folder has `work`, in which the program starts, `home`, its HOME, and `tmp`, its TMPDIR. All programs see
theirs at the same path (`path`), so that prompts which name it share their beginning: in a mount namespace
(`command_inside`), or in a container (`containers`). The episode ends with the program, and all that the program
started ends with the episode.

A RolloutWorker's folders are in one that it holds a lock on. What a dead worker left, folders and containers, is
removed by the next one on the host: it finds the folder without a lock.
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import itertools
import json
import logging
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from asyncrl.api import Agent, Environment, Outcome, Prompt
from asyncrl.comm.files import FileLock, NotPrivate, read_own_file
from asyncrl.comm.waits import REPEAT_S, STOP_S, TOOL_S, RunningTimeout
from asyncrl.config.plugin_code.import_paths import load_plugin
from asyncrl.config.plugin_code.threads import DaemonThreads
from asyncrl.plugins.agents.command_files import (
    OF_SESSION,
    Copied,
    files_of,
    filled,
    place_of,
    text_of,
    texts_of,
    write,
)
from asyncrl.plugins.agents.containers import (
    EXIT_BY_SIGNAL,
    EXIT_ENGINE_FAILED,
    NAME_LABEL,
    WORKER_LABEL,
    Engine,
    EngineFailed,
    remove_containers,
)

INSIDE: Final = Path(__file__).with_name("command_inside.py")
PATH: Final = "/tmp/episode"
REWARD_S: Final = 60.0
"""Default time limit, in s, of a reward: it runs tests, not an agent."""
GONE_S: Final = 15.0
"""Longest time, in s, for a program to end with all that it started; `supervisor.GONE_LIMIT_S` and a margin."""
_PREFIX: Final = "asyncrl-episodes-"
_INHERITED: Final = ("PATH", "LANG", "LC_ALL", "TZ", "ASYNCRL_LAUNCH")
"""The last one marks what belongs to a launch (`asyncrl.runtime.supervisor`)."""
_OWN: Final = ("HOME", "TMPDIR", "PWD", "NO_PROXY", "no_proxy")
"""Variables of each episode; `env` may not give them, but adds to the last two."""
_CHUNK: Final = 1 << 16
_MOST_CALLS: Final = 32
"""Calls of a reward's function that run at a time; and calls that may be abandoned and still run."""
_SHOWN_LINES, _SHOWN_CHARS = 8, 1500

_log = logging.getLogger(__name__)


class ProgramFailed(RuntimeError):
    """The program got no answer from the policy: it is not installed, or failed before. The message has its output."""


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


class CommandAgent(Agent):
    """An episode is a run of `command`, and its reward is of what the command leaves behind, whatever its exit code.

    In `command`, `env` and `files`, `{base_url}` (OpenAI's clients), `{root_url}` (Anthropic's) and `{api_key}` are
    the policy's address and key, `{row.<field>}` is a field of the dataset's row (as JSON if it is no text), and
    `{brace}` is `{`. Other words in braces are refused; braces around anything else, and `{{word}}`, stay as they are.

    Metrics: `agent/exit_nonzero`, `agent/timed_out`, `agent/output_truncated` and `agent/reward_failed`, shares of
    samples, and `agent/program_s`.

    Args:
        tokenizer: the run's tokenizer; not needed.
        command: program and arguments; no shell reads them.
        env: environment variables. Of the worker's own the program gets PATH, LANG, LC_ALL, TZ, in a container none.
        files: text by name, below the folder in which the program starts, or below HOME if the name begins with `~/`;
            or `{path: ...}`, a file or folder to copy there as it is.
        row_files: field of the row with more files, text by name, which are written as they are.
        reward: import path of `def reward(prompt, folder) -> float`, called in a thread after the program's end with
            the folder in which it started, and with what it printed as `output` if it has such a parameter; or the
            settings of a `RewardFunction` or `RewardCommand`. None: the experiment's environment scores what the
            program printed.
        path: where all programs see their folder. None: each sees its own path, on systems that cannot mount it.
        timeout_s: time limit of the program, in s; then it is ended, and rewarded as it is. None: only
            `rollout.rollout_timeout_s` limits it, after which the episode is lost.
        output_kb: kilobytes that are kept of each of the program's two outputs, from their ends.
        image: image of the containers in which programs run; None: they run on the host, as the worker's user.
        engine: command of the containers' engine: `docker`, `podman`, or a list with options of it.
        network: network of the containers. With `host` they reach the endpoint as it is by default, and all else that
            listens on the worker's host.
        run_args: further options of the engine's `run`, such as `--memory=2g`.

    Raises:
        ValueError: an argument is wrong, or the program, the engine or the image is missing.
    """

    def __init__(
        self,
        *,
        tokenizer: object = None,
        command: Sequence[str],
        env: Mapping[str, Any] | None = None,
        files: Mapping[str, Any] | None = None,
        row_files: str | None = None,
        reward: str | Mapping[str, Any] | None = None,
        path: str | None = PATH,
        timeout_s: float | None = None,
        output_kb: int = 256,
        image: str | None = None,
        engine: str | Sequence[str] = "docker",
        network: str = "bridge",
        run_args: Sequence[str] = (),
    ) -> None:
        self._command = texts_of("command", command, OF_SESSION)
        self._env = {name: text_of(f"env[{name}]", value, OF_SESSION) for name, value in (env or {}).items()}
        if taken := [name for name in _OWN[:3] if name in self._env]:
            raise ValueError(f"env[{taken[0]}]: is of each episode; leave it out")
        self._files, self._row_files = files_of("files", files or {}, OF_SESSION), row_files
        self._reward = _reward_of(reward)
        self._reward_command = self._reward if isinstance(self._reward, RewardCommand) else None
        self._function = _function_of(self._reward.path) if isinstance(self._reward, RewardFunction) else None
        self._threads, self._free_threads = DaemonThreads(), asyncio.Semaphore(_MOST_CALLS)
        self._abandoned: set[Future[object]] = set()
        if timeout_s is not None and timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: give a positive number of seconds, or null")
        if output_kb < 1:
            raise ValueError(f"output_kb={output_kb}: give at least 1")
        self._timeout_s, self._output_bytes = timeout_s, output_kb << 10
        if path is not None and (os.path.normpath(path) != path or not path.startswith("/") or set(path) & set(",:")):
            raise ValueError(f"path={path!r}: give an absolute path without ',' and ':', or null")
        self._path = path
        self._engine: Engine | None = None
        if image is not None:
            self._path = path or PATH
            self._engine = Engine(engine, image, network, run_args)
            try:
                self._engine.check()
            except EngineFailed as error:
                raise ValueError(str(error)) from None
        else:
            self._command[0] = _program("command[0]", self._command[0], self._env.get("PATH"))
            if self._reward_command is not None:
                program, *arguments = self._reward_command.command
                judge = _program("reward: command[0]", program, None)
                self._reward_command = replace(self._reward_command, command=[judge, *arguments])
            if path is not None:
                _try_to_mount(path)
        self._folders: _Folders | None = None
        self._making = asyncio.Lock()
        self._told_at = -math.inf

    async def run(self, prompt: Prompt, env: Environment, client: Any) -> Outcome:
        """Run the program once.

        Raises:
            ProgramFailed: it got no answer from the policy.
            RewardFailed: the reward gave no number, and has no `failure_reward`.
            EngineFailed: the container could not be started, or the engine failed.
        """
        session = await client.endpoint()
        values = {name: getattr(session, name) for name in OF_SESSION}
        host = urlsplit(session.base_url).hostname or ""
        if self._engine is not None and self._engine.network != "host" and _is_loopback(host):
            raise EngineFailed(
                f"a container does not reach the endpoint at {host}, the worker's own loopback: set "
                "rollout.endpoint.host to an address that containers reach, such as that of the engine's bridge (`ip "
                "addr`), or agent.args.network=host"
            )
        async with self._folder() as folder:
            await asyncio.to_thread(self._fill, folder, values, prompt.data)
            command = [filled(word, values, prompt.data) for word in self._command]
            own_env = {name: filled(text, values, prompt.data) for name, text in self._env.items()}
            own_env |= dict.fromkeys(_OWN[3:], ",".join(filter(None, (*map(own_env.get, _OWN[3:]), host))))
            ended = await self._ended(folder, command, own_env, self._timeout_s)
            if not client.all_samples():
                raise ProgramFailed(f"{command[0]} got no answer from the policy: it {ended}")
            if ended.exit_code != 0 and time.monotonic() - self._told_at > REPEAT_S:
                self._told_at = time.monotonic()
                _log.info("a program %s (further ones are not logged for %g s)", ended, REPEAT_S)
            reward, reward_failed = await self._judge(prompt, env, folder, ended)
        if reward is None:
            return None
        metrics = {
            "exit_nonzero": float(ended.exit_code != 0),
            "timed_out": float(ended.exit_code is None),
            "output_truncated": float(ended.truncated),
            "reward_failed": float(reward_failed),
            "program_s": ended.seconds,
        }
        return [replace(sample, metrics={**sample.metrics, **metrics}) for sample in client.all_samples(reward)]

    @asynccontextmanager
    async def _folder(self) -> AsyncIterator[Path]:
        """Yield a new folder, which is removed at the end."""
        async with self._making:
            if self._folders is None:
                self._folders = await asyncio.to_thread(_Folders, None if self._engine is None else self._engine.words)
            folders = self._folders
            folder = folders.begin()
        try:
            await asyncio.to_thread(_made, folder)
            yield folder
        finally:
            try:
                await asyncio.to_thread(remove, folder)
            finally:
                folders.end()
                if folders.is_closed and self._folders is folders:
                    self._folders = None

    def _fill(self, folder: Path, values: Mapping[str, str], row: Mapping[str, Any]) -> None:
        """Write the episode's files."""
        for name, content in self._files.items():
            write(folder, place_of(folder, name), content, values, row)
        if self._row_files is not None:
            given = row.get(self._row_files)
            if not isinstance(given, Mapping) or not all(isinstance(text, str) for text in given.values()):
                raise ValueError(f"row_files={self._row_files!r}: the row's field is {given!r:.80}, no texts by name")
            for name, text in given.items():
                write(folder, place_of(folder, str(name)), Copied(text), values, row)

    async def _ended(
        self, folder: Path, command: Sequence[str], env: Mapping[str, str], limit_s: float | None, own: str = ""
    ) -> Ended:
        """Run a command in the episode's folder, and wait until it has ended with all that it started.

        Args:
            own: what stands before its `home` and `tmp` below that folder.

        Raises:
            ProgramFailed: it cannot be started.
            EngineFailed: its container cannot be started, or the engine failed.
        """
        path = self._path or str(folder)
        env = {**env, "HOME": f"{path}/{own}home", "TMPDIR": f"{path}/{own}tmp", "PWD": f"{path}/work"}
        if self._engine is None:
            inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
            started = [sys.executable, "-I", "-S", str(INSIDE), str(folder), path, *command]
            return await _run(started, {**inherited, **env}, limit_s, self._output_bytes, ends_with_input=True)
        assert self._folders is not None
        if self._folders.left:
            await self._remove(self._folders.left.pop())
        name, worker = f"{self._folders.path.name}-{next(self._folders.containers)}", self._folders.path.name
        secret = [key for key, text in self._env.items() if "{api_key}" in text]
        started = self._engine.run_command(name, worker, folder, path, env, secret, command)
        seen = {**os.environ, **{key: env[key] for key in secret if key in env}}
        ended, is_gone = None, True
        try:
            ended = await _run(started, seen, limit_s, self._output_bytes, ends_with_input=False)
        finally:
            code = None if ended is None else ended.exit_code
            if code is None or code == EXIT_ENGINE_FAILED or code > EXIT_BY_SIGNAL:
                is_gone = await self._remove(name)
        if code == EXIT_ENGINE_FAILED:
            raise EngineFailed(f"{self._engine.words[0]} {ended}")
        if not is_gone:
            raise EngineFailed(f"container {name} may still run and change what is judged, so the episode is lost")
        return ended

    async def _remove(self, container: str) -> bool:
        """Remove a container whose end is unknown; return whether it is gone. Else a later episode or worker tries."""
        assert self._engine is not None
        assert self._folders is not None
        try:
            await asyncio.to_thread(remove_containers, self._engine.words, NAME_LABEL, container)
        except EngineFailed as error:
            self._folders.left.append(container)
            _log.warning("container %s may still run, and is removed later: %s", container, error)
            return False
        return True

    async def _judge(self, prompt: Prompt, env: Environment, folder: Path, ended: Ended) -> tuple[float | None, bool]:
        """Return the episode's reward, None to reject it; and whether it is the `failure_reward`."""
        if self._reward is None:
            await env.reset(options={"data": prompt.data})
            return float((await env.step(ended.stdout.strip()))[1]), False
        await asyncio.to_thread(_mend, folder)
        try:
            if self._function is not None:
                work = partial(self._function, prompt, folder / "work", ended.stdout)
                return _number(await self._called(work, self._reward.timeout_s)), False
            return await self._of_command(folder, ended, prompt.data), False
        except RewardFailed as error:
            if self._reward.failure_reward is None:
                raise
            _log.info("%s; the episode is given failure_reward=%g", error, self._reward.failure_reward)
            return self._reward.failure_reward, True

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
        reward = self._reward_command
        assert reward is not None
        await asyncio.to_thread(self._fill_reward, folder, ended, row)
        command = [filled(word, {}, row) for word in reward.command]
        judged = await self._ended(folder, command, {}, reward.timeout_s, "reward/")
        last = (judged.stdout.strip().splitlines() or [""])[-1]
        with suppress(ValueError):
            if judged.exit_code == 0 and math.isfinite(number := float(last)):
                return number
        raise RewardFailed(
            f"{command[0]} is to end with exit code 0, and the last line of its output is to be a number; it {judged}"
        )

    def _fill_reward(self, folder: Path, ended: Ended, row: Mapping[str, Any]) -> None:
        """Write what the reward's command reads into a new folder, whatever the program has put in its place."""
        assert self._reward_command is not None
        beside = folder / "reward"
        remove(beside)
        for name in ("", "home", "tmp"):  # in the program's own, Python and others would find what it put there
            (beside / name).mkdir()
        (beside / "output.txt").write_text(ended.stdout, encoding="utf-8")
        for name, content in files_of("reward: files", self._reward_command.files, ()).items():
            write(beside, beside / name, content, {}, row)


class _Folders:
    """Folders of the episodes that an agent runs, after what dead workers left is removed. Blocks.

    Attributes:
        path: the folder of all, on which this process holds a lock; its name is a label of the worker's containers.
        containers: their numbers.
        left: containers that could not be removed.
        is_closed: True after the last episode's end.
    """

    def __init__(self, engine: Sequence[str] | None) -> None:
        everything = Path(tempfile.gettempdir())
        for old in everything.glob(f"{_PREFIX}*"):
            remove_abandoned(old)
        new = Path(tempfile.mkdtemp(prefix="asyncrl-new-"))
        self._lock = FileLock(new / "lock")
        self._lock.take()
        (new / "engine.json").write_text(json.dumps(engine))
        self.path = everything / f"{_PREFIX}{new.name.removeprefix('asyncrl-new-')}"
        new.rename(self.path)  # it is locked when others see it
        self.containers = itertools.count(1)
        self.left: list[str] = []
        self.is_closed = False
        self._numbers, self._running = itertools.count(1), 0

    def begin(self) -> Path:
        """Return the path of a new episode's folder."""
        self._running += 1
        return self.path / str(next(self._numbers))

    def end(self) -> None:
        """An episode is over. With the last one the folder goes, unless its name is needed to find a container."""
        self._running -= 1
        if not self._running and not self.left:
            self.is_closed = True
            remove(self.path)
            self._lock.close()


def remove_abandoned(folder: Path) -> None:
    """Remove the folder of a worker that has died, and its containers; do nothing if it is alive or another user's."""
    try:
        if folder.lstat().st_uid != os.geteuid():
            return
        with FileLock(folder / "lock") as lock:
            if not lock.take():
                return
            engine = json.loads(read_own_file(folder / "engine.json", _CHUNK))
            if engine:
                remove_containers(engine, WORKER_LABEL, folder.name)
            remove(folder)
    except (OSError, NotPrivate, ValueError, EngineFailed) as error:
        _log.warning("%s, which a dead worker left, cannot be removed: %s", folder, error)


def remove(path: Path) -> None:
    """Remove a file or folder with all that it contains, folders that nobody may write to included.

    Only folders are opened: a pipe would wait for its other end, and a link leads elsewhere.
    """
    try:
        is_folder = stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_folder:
        path.unlink()
        return
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        for folder, _, _ in os.walk(path):
            with suppress(OSError):
                os.chmod(folder, stat.S_IRWXU)
        shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        _log.warning("%s cannot be removed, for want of rights", path)


def _made(folder: Path) -> None:
    for name in ("", "work", "home", "tmp"):
        (folder / name).mkdir(mode=0o700)


def _mend(folder: Path) -> None:
    """Make `work` and the folder itself usable again, whatever the program has done with them."""
    for place in (folder, folder / "work"):
        mode = place.lstat().st_mode if os.path.lexists(place) else 0
        if not stat.S_ISDIR(mode):
            remove(place)
            place.mkdir(mode=0o700)
        elif mode & stat.S_IRWXU != stat.S_IRWXU:
            place.chmod(stat.S_IMODE(mode) | stat.S_IRWXU)


async def _run(
    command: Sequence[str], env: Mapping[str, str], limit_s: float | None, kept_bytes: int, *, ends_with_input: bool
) -> Ended:
    """Run a command until it ends or for `limit_s`, then wait until it is gone.

    Args:
        ends_with_input: it ends by itself when its standard input does; else it is killed.

    Raises:
        ProgramFailed: it cannot be started.
    """
    begun = time.monotonic()
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd="/", start_new_session=True
        )
    except (OSError, ValueError) as error:
        raise ProgramFailed(f"{command[0]} cannot be started: {error}") from error
    assert process.stdin is not None
    tails = [_Tail(stream, kept_bytes) for stream in (process.stdout, process.stderr)]
    timed_out = False
    try:
        async with asyncio.timeout(limit_s):
            await process.wait()
    except TimeoutError:
        timed_out = True
    finally:
        process.stdin.close()
        if process.returncode is None and ends_with_input:
            with suppress(TimeoutError):
                async with asyncio.timeout(GONE_S):
                    await process.wait()
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait([tail.reading for tail in tails], timeout=STOP_S)
        for tail in tails:
            tail.reading.cancel()
    out, err = (bytes(tail.kept).decode(errors="replace") for tail in tails)
    code = process.returncode
    exit_code = None if timed_out or code is None else code if code >= 0 else 128 - code
    return Ended(exit_code, out, err, any(tail.dropped for tail in tails), time.monotonic() - begun)


class _Tail:
    """Reads a stream to its end and keeps the last bytes."""

    def __init__(self, stream: asyncio.StreamReader | None, most_bytes: int) -> None:
        assert stream is not None
        self.kept, self.dropped = bytearray(), False
        self.reading = asyncio.create_task(self._read(stream, most_bytes))

    async def _read(self, stream: asyncio.StreamReader, most_bytes: int) -> None:
        while piece := await stream.read(_CHUNK):
            self.kept += piece
            if len(self.kept) > most_bytes:
                self.dropped = True
                del self.kept[:-most_bytes]


def _program(what: str, name: str, path: str | None) -> str:
    """Return the absolute path of the program that the setting `what` names.

    Raises:
        ValueError: there is no such program.
    """
    given = str(Path(name).expanduser())
    found = shutil.which(given, path=path)
    if found is None:
        raise ValueError(f"{what}={name!r}: no such program here; install it on each host, or give its path")
    return os.path.abspath(found)


def _try_to_mount(path: str) -> None:
    """Check that programs can have their folders at `path`.

    Raises:
        ValueError: this system does not allow it.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-trial-") as name:
        _made(folder := Path(name, "episode"))
        started = [sys.executable, "-I", "-S", str(INSIDE), str(folder), path, "true"]
        with subprocess.Popen(started, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tried:
            ended = threading.Timer(TOOL_S, tried.kill)
            ended.start()
            assert tried.stderr is not None
            said = tried.stderr.read()
            ended.cancel()
    if tried.returncode != 0:
        raise ValueError(
            f"path={path!r}: a program's folder cannot be mounted there: {said.strip()[-300:]}; let users have "
            "namespaces (user.max_user_namespaces), or give an image, or path=null, with which each episode's folder "
            "has another path"
        )


def _reward_of(given: object) -> RewardFunction | RewardCommand | None:
    """Return the reward that a setting describes.

    Raises:
        ValueError: it describes none.
    """
    if given is None:
        return None
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
    if given is None:
        return None
    if isinstance(given, Real) and math.isfinite(given):
        return float(given)
    raise RewardFailed(f"the reward's function returned {given!r:.80}; return a finite number, or None to reject it")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
