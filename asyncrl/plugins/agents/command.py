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
import ipaddress
import itertools
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from asyncrl.api import Agent, Environment, Outcome, Prompt
from asyncrl.comm.files import FileLock, NotPrivate, read_own_file
from asyncrl.comm.waits import REPEAT_S, STOP_S, TOOL_S
from asyncrl.plugins.agents.command_files import (
    OF_SESSION,
    Copied,
    files_of,
    filled,
    place_of,
    program_of,
    remove,
    text_of,
    texts_of,
    write,
)
from asyncrl.plugins.agents.command_reward import Ended, Judge
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
GONE_S: Final = 15.0
"""Longest time, in s, for a program to end with all that it started; `supervisor.GONE_LIMIT_S` and a margin."""
_PREFIX: Final = "asyncrl-episodes-"
_INHERITED: Final = ("PATH", "LANG", "LC_ALL", "TZ", "ASYNCRL_LAUNCH")
"""The last one marks what belongs to a launch (`asyncrl.runtime.supervisor`)."""
_OWN: Final = ("HOME", "TMPDIR", "PWD", "NO_PROXY", "no_proxy")
"""Variables of each episode; `env` may not give them, but adds to the last two."""
_CHUNK: Final = 1 << 16

_log = logging.getLogger(__name__)


class ProgramFailed(RuntimeError):
    """The program got no answer from the policy: it is not installed, or failed before. The message has its output."""


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
        self._judge = None if reward is None else Judge(reward, self._ended, on_host=image is None)
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
            self._command[0] = program_of("command[0]", self._command[0], self._env.get("PATH"))
            if path is not None:
                _try_to_mount(path)
        self._folders: _Folders | None = None
        self._making = asyncio.Lock()
        self._told_at = -math.inf

    async def run(self, prompt: Prompt, env: Environment, client: Any) -> Outcome:
        """Run the program once.

        Raises:
            ProgramFailed: it got no answer from the policy.
            RewardFailed: the reward gave no number, and has no `failure_reward` (`command_reward`).
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
            if self._judge is not None:
                reward, reward_failed = await self._judge.reward(prompt, folder, ended)
            else:
                await env.reset(options={"data": prompt.data})
                reward, reward_failed = float((await env.step(ended.stdout.strip()))[1]), False
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


def _made(folder: Path) -> None:
    for name in ("", "work", "home", "tmp"):
        (folder / name).mkdir(mode=0o700)


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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
