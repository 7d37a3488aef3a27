"""Unmodified environments of the `verifiers` package: its classic API (0.2) and its v1 API (0.4).

Both pin packages that clash with asyncrl's extras and with each other. So `verifiers` is installed in a separate
virtual environment (`asyncrl install verifiers`), in which `verifiers_host.py` runs the environment: its dataset,
turns, tools and rubric. The environment calls the policy over the episode's endpoint, which records every token. Only
the reward and the metrics of its result are used.

`verifiers` frees an episode's containers, sandboxes and folders at its end, also when the process is asked to end. If
the process is killed, nobody does. So containers have a label of their process (`verifiers.run`), and a cleaner beside
it, which outlives both it and the RolloutWorker, removes those that are left.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from asyncrl.api import Agent, Environment, Prompt, Sample

HOST: Final = Path(__file__).with_name("verifiers_host.py")
START_LIMIT_S: Final = 300.0
"""Longest time, in s, for an environment to load: some fetch data."""
END_LIMIT_S: Final = 10.0
"""Longest time, in s, that a process has for its own end, once its input is closed; then it is killed."""
SPLITS: Final = ("train", "held_out")
ENGINES: Final = frozenset({"docker", "podman"})
"""Runtimes of `verifiers` whose containers outlive the process that started them."""
REAPER: Final = Path(__file__).parents[2] / "runtime" / "reaper.py"
"""Ends a program with SIGTERM when its own input ends, and is given time for that by those who end everything."""
CLEANER: Final = """
trap '
  for round in 1 2 3; do  # what the engine was making may appear a moment later
    left=$("$0" ps --all --quiet --filter "label=$1") ||
      { echo "$0 does not answer: containers with the label $1 may be left" >&2; exit 1; }
    if [ -n "$left" ]; then
      "$0" kill $left >/dev/null 2>&1  # else podman asks them to end, and waits for ten seconds
      "$0" rm --force $left >/dev/null
    fi
    sleep 1
  done
  exit' TERM
while :; do sleep 3600 & wait $!; done
"""
"""`sh -c CLEANER ENGINE LABEL`: at SIGTERM, remove the containers with that label."""
LINE_LIMIT: Final = 256 << 20
"""Most bytes of a reply: the rows of a large dataset."""


class VerifiersError(RuntimeError):
    """The environment or its process failed; the message contains its own error."""


class VerifiersDataset:
    """The rows of an environment, in its order; name it in `dataset.path`.

    Args:
        split: `train`: the environment's dataset; `held_out`: its eval dataset.
        seed: not needed.
        python: the interpreter of the environment that has `verifiers`.
        env: a file that has `load_environment` (classic) or exports a taskset (v1), or the name of an installed one.
        args: arguments of `load_environment` (classic), or the environment's config (v1).

    Raises:
        ValueError: the environment cannot be loaded, or has no such rows.
    """

    program: ClassVar[Path] = HOST

    def __init__(self, *, split: str, seed: int, python: str, env: str, args: Mapping[str, Any] | None = None) -> None:
        try:
            found = _rows(_command(python, self.program), _line({**_what(env, args), "rows": SPLITS}))[split]
        except OSError as error:
            raise ValueError(f"python={python!r} cannot be started: {error}") from None
        if "error" in found:
            raise ValueError(f"env={env!r}: {found['error']}")
        self._prompts = [row["prompt"] for row in found["rows"]]
        self._split, self._env = split, env

    def __len__(self) -> int:
        return len(self._prompts)

    def row(self, index: int) -> Mapping[str, Any]:
        """Return row `index`: its prompt, and its position in the environment's dataset."""
        return {"prompt": self._prompts[index], "verifiers": {"env": self._env, "split": self._split, "row": index}}


class VerifiersAgent(Agent):
    """An episode is a rollout of the environment; its rubric's reward is the episode's; `env` and `reward` of the
    experiment are not used.

    Every function of the rubric that has a weight is logged as `reward/<name>`, the others as `agent/<name>`. All
    episodes of a RolloutWorker run in one process, which is renewed from time to time.

    Args:
        tokenizer: the run's tokenizer; not needed.
        python, env, args: as for `VerifiersDataset`.
        max_episodes: episodes after which the process is replaced, so that its memory does not grow.
        within: agents of the environment whose runs are compared with those of the same episode only, such as the
            solvers of one proposed problem. Runs of other agents are compared with those of the same agent in all
            episodes of the group.
    """

    program: ClassVar[Path] = HOST
    rows_by: ClassVar[str] = "asyncrl.plugins.agents.verifiers_env:VerifiersDataset"
    apart: ClassVar[bool] = True
    """Whether calls with a header `X-Session-ID` belong to the run of the environment that it names."""

    def __init__(
        self,
        *,
        tokenizer: object = None,
        python: str,
        env: str,
        args: Mapping[str, Any] | None = None,
        max_episodes: int = 1000,
        within: Sequence[str] = (),
    ) -> None:
        if max_episodes < 1:
            raise ValueError(f"agent max_episodes is {max_episodes}: give at least 1")
        self._python, self._env, self._args, self._max_episodes = python, env, args, max_episodes
        self._within = frozenset(within)
        self._host: _Host | None = None
        self._retired: list[_Host] = []
        self._starting = asyncio.Lock()

    async def run(self, prompt: Prompt, env: Environment, client: Any) -> Sequence[Sample]:
        """Run one rollout of the environment and return its samples.

        Raises:
            VerifiersError: the environment failed.
        """
        row = prompt.data.get("verifiers")
        if not isinstance(row, Mapping) or row["env"] != self._env:
            raise VerifiersError(
                f"prompt {prompt.prompt_id} is not a row of {self._env!r}: set dataset.path to {self.rows_by} with "
                "dataset.args as agent.args"
            )
        session = await client.endpoint(apart=self.apart)
        host = await self._ready()
        async with host:
            answered = await host.run(row["row"], row["split"], session.base_url, session.api_key)
        samples: list[Sample] = []
        for run in answered.get("runs", [answered]):
            if not run.get("trained", True):
                continue
            own = client.conversation(run["trace"]) if "trace" in run else client
            group = self._group(run.get("agent", ""), prompt)
            parts = {"reward_parts": run["parts"], "metrics": run["metrics"]}
            for sample in own.samples(run["reward"]):
                side = sample.group.removeprefix(run.get("trace", "")).removeprefix("/")
                own_group = "/".join(filter(None, (group, side)))
                samples.append(replace(sample, group=own_group, **parts))
        if not samples:
            why = client.why_no_samples or "it never asked the policy"
            raise VerifiersError(f"{self._env!r} has no sample of row {row['row']}: {why}")
        return samples

    def _group(self, agent: str, prompt: Prompt) -> str:
        """Return the comparison group of the runs of `agent`."""
        return f"{agent}/{prompt.member}" if agent in self._within else agent

    async def close(self) -> None:
        """End the processes; they also end with the RolloutWorker."""
        hosts = self._retired if self._host is None else [*self._retired, self._host]
        self._host, self._retired = None, []
        await asyncio.gather(*(host.close() for host in hosts))

    async def _ready(self) -> _Host:
        async with self._starting:
            if self._host is not None and self._host.episodes >= self._max_episodes:
                self._host.retire()
                self._retired = [host for host in (*self._retired, self._host) if not host.has_ended]
                self._host = None
            if self._host is None or self._host.has_ended:
                self._host = await _Host.start(self._python, self._env, self._args, self.program)
            self._host.episodes += 1
            return self._host


class _Host:
    """Client of the process that runs the environment. An episode holds it with `async with`."""

    def __init__(
        self, process: asyncio.subprocess.Process, env: str, cleaners: Sequence[asyncio.subprocess.Process] = ()
    ) -> None:
        self.episodes = 0
        self.has_ended = False
        """True if the program answers no more requests."""
        self._process, self._env, self._cleaners = process, env, cleaners
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._users = 0
        self._retired = False
        self._closing: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, python: str, env: str, args: Mapping[str, Any] | None, program: Path = HOST) -> _Host:
        """Start a process and wait until it has loaded the environment.

        Raises:
            VerifiersError: it cannot load it.
        """
        pipe, run_id = asyncio.subprocess.PIPE, f"asyncrl-{uuid.uuid4().hex}"
        try:
            process = await asyncio.create_subprocess_exec(
                *_command(python, program),
                stdin=pipe,
                stdout=pipe,
                limit=LINE_LIMIT,
                env=os.environ | {"VF_RUN_ID": run_id},
            )
        except OSError as error:
            raise VerifiersError(f"agent python={python!r} cannot be started: {error}") from None
        cleaners: list[asyncio.subprocess.Process] = []
        host = cls(process, env, cleaners)
        try:
            for engine in sorted(_engines(args)):
                cleaners.append(await _cleaner(engine, f"verifiers.run={run_id}"))
            async with asyncio.timeout(START_LIMIT_S):
                host._send(_what(env, args))
                ready = await host._read()
        except TimeoutError:
            fault = f"was not loaded within {START_LIMIT_S:g} s"
        except ValueError as error:
            fault = f"cannot be loaded: {error}"
        except BaseException:  # the episode's time is over
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            host._clean_up()
            raise
        else:
            if ready is not None and "error" not in ready:
                host._reading = asyncio.create_task(host._read_all())
                return host
            fault = f"cannot be loaded: {(ready or {}).get('error', 'its process ended')}"
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await host.close()
        raise VerifiersError(f"{env!r} {fault}")

    async def __aenter__(self) -> None:
        self._users += 1

    async def __aexit__(self, *_: object) -> None:
        self._users -= 1
        if self._retired and not self._users:
            self._closing = asyncio.create_task(self.close())

    def retire(self) -> None:
        """End the process once the last episode that uses it is over."""
        self._retired = True
        if not self._users:
            self._closing = asyncio.create_task(self.close())

    async def run(self, row: int, split: str, base_url: str, api_key: str) -> dict[str, Any]:
        """Return the reward, its parts and the metrics of one rollout.

        Raises:
            VerifiersError: it failed, or the process ended.
        """
        if self.has_ended:
            raise self._gone()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send({"id": number, "run": row, "split": split, "base_url": base_url, "api_key": api_key})
        try:
            answered: dict[str, Any] = await answer
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)
        if "error" in answered:
            raise VerifiersError(f"{self._env!r}, row {row}: {answered['error']}")
        return answered

    async def close(self) -> None:
        """End the process and wait until it has ended; kill it after `END_LIMIT_S`."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(END_LIMIT_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await self._reading
        self._clean_up()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_LIMIT_S):
                await asyncio.gather(*(cleaner.wait() for cleaner in self._cleaners))

    def _clean_up(self) -> None:
        """Have the containers removed that the process left."""
        for cleaner in self._cleaners:
            assert cleaner.stdin is not None
            cleaner.stdin.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(_line(message))

    async def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            return None
        return _reply(line)

    async def _read_all(self) -> None:
        error = self._gone()
        try:
            while (answered := await self._read()) is not None:
                if (answer := self._waiting.get(answered["id"])) is not None and not answer.done():
                    answer.set_result(answered)
        except (ValueError, KeyError) as wrong:  # not a reply, or longer than `LINE_LIMIT`
            error = VerifiersError(f"{self._env!r}: {wrong}")
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self.has_ended = True
        self._clean_up()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)

    def _gone(self) -> VerifiersError:
        return VerifiersError(f"the process that runs {self._env!r} ended; see the worker's log")


@functools.lru_cache(maxsize=4)
def _rows(command: tuple[str, ...], what: bytes) -> Mapping[str, Mapping[str, Any]]:
    """Return, by split, its `rows` or the `error` instead. Cached per process, because loading takes seconds."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        limit = threading.Timer(START_LIMIT_S, process.kill)
        limit.start()
        reply: dict[str, Any] = {"error": "its process ended; see the log"}
        try:
            process.stdin.write(what)
            process.stdin.flush()
            if line := process.stdout.readline():
                reply = _reply(line)
        except BrokenPipeError:  # it has ended
            pass
        except ValueError as error:
            process.kill()
            reply = {"error": str(error)}
        finally:
            limit.cancel()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
    return {split: reply for split in SPLITS} if "error" in reply else reply


async def _cleaner(engine: str, label: str) -> asyncio.subprocess.Process:
    """Start a process that removes the containers with `label` once its input ends, also because this process does.

    It has a session of its own and no mark of the run, by which leftovers of a run are found and killed.
    """
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(REAPER), str(END_LIMIT_S - 3.0), "sh", "-c", CLEANER, engine, label),
        stdin=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("ASYNCRL_")},
        start_new_session=True,
    )


def _engines(config: object) -> frozenset[str]:
    """Return the container engines that a config of `verifiers` names, each as the `type` of a runtime."""
    if isinstance(config, Mapping):
        own = frozenset(engine for engine in ENGINES if config.get("type") == engine)
        return own.union(*map(_engines, config.values()))
    return frozenset().union(*map(_engines, config)) if isinstance(config, list | tuple) else frozenset()


def _command(python: str, program: Path) -> tuple[str, ...]:
    """Return the command of the host process; `-P` keeps this folder off the import path."""
    return (str(Path(python).expanduser()), "-P", str(program))


def _what(env: str, args: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return {"env": env, "args": dict(args or {})}


def _reply(line: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(reply := json.loads(line), dict):
            return reply
    raise ValueError(f"its process printed what is not a reply: {line[:80]!r}")


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
