"""Runs an experiment as its user would, injects the faults of a plan, and watches until it has ended.

The run is a child process, `python -m asyncrl.launch EXPERIMENT ...`. All information about it comes from its files and
from name resolution, and every fault could be caused by anybody with the user's rights. After a launcher was killed by
the plan the same command is given again, as a person or a supervisor would do; the run gets no other help.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from asyncrl.comm import names
from asyncrl.comm.http.calls import HttpError, JsonHttp
from asyncrl.comm.name_resolve import NameResolver
from asyncrl.comm.name_resolve.errors import NameResolveError
from asyncrl.comm.security.run_secret import HttpSecurity, RunSecret, SecretError
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import METRICS_FILE, SECRET_FILE, run_dir_of
from asyncrl.manager.messages import StatusReply
from asyncrl.runtime.process.worker import open_resolver
from asyncrl.verify.chaos.fault_costs import LAUNCHER, InjectedFault
from asyncrl.verify.chaos.fault_plan import DELAY_S, Fault, FaultKind, PlanClock
from asyncrl.verify.chaos.full_disk import Ballast
from asyncrl.verify.chaos.links import Links

LOOK_S = 0.05
"""Time between two checks of the run."""
LINK_LOOK_S = 0.01
"""Time between two checks of addresses: a process that reads one before its proxy is entered bypasses the proxy."""
SILENCE_LIMIT_S = 600.0
"""A run that makes no step and prints nothing for so long will not end by itself."""
_LINES_KEPT = 60
_CALL_LIMIT_S = 2.0


@dataclass(slots=True)
class Watched:
    """Observations of a run.

    Attributes:
        code: exit code of its last launcher; None if it had to be killed.
        done: the injected faults.
        left: the faults that were not injected, and why.
        steps: when each row of metrics was seen, and its step.
        lines: the last lines that the launchers printed.
        began: seconds since 1970.
    """

    began: float
    code: int | None = None
    done: list[InjectedFault] = field(default_factory=list)
    left: list[tuple[Fault, str]] = field(default_factory=list)
    steps: list[tuple[float, int]] = field(default_factory=list)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES_KEPT))
    interrupted: bool = False


class ChaosRun:
    """One run with injected faults.

    Args:
        config: the run's settings, as its launcher will resolve them.
        command: starts the run.
        again: continues the run after its launcher died.
        links: the processes behind proxies, and their entries in name resolution.
        tell: called with lines for a person.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        command: Sequence[str],
        again: Sequence[str],
        plan: Sequence[Fault],
        *,
        links: Mapping[str, str],
        tell: Callable[[str], None],
    ) -> None:
        self._config, self._command, self._again = config, list(command), list(again)
        self._run_dir = run_dir_of(config)
        self._clock = PlanClock(plan)
        self._links = Links(config.system.host, config.system.lease_s, links)
        self._tell = tell
        self._rows = _NewRows(self._run_dir / METRICS_FILE)
        self._seen = Watched(time.time())
        self._heard_at = time.monotonic()
        self._begun = False
        self._killed: set[int] = set()
        """Ids of the killed processes; the kernel reuses an id only after thousands of others."""
        self._launched = asyncio.Event()
        """Set while there is a launcher that has not been killed."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._resolver: NameResolver | None = None

    async def run(self) -> Watched:
        """Run it to its end."""
        await self._links.start()
        linking = asyncio.create_task(self._keep_links())
        try:
            await self._launch(self._command)
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
            while True:
                if await self._look():
                    break
                await asyncio.sleep(LOOK_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                self._launcher.kill()
            for task in (linking, *self._tasks):
                task.cancel()
            await asyncio.gather(linking, *self._tasks, return_exceptions=True)
            await self._links.close()
            if self._resolver is not None:
                await asyncio.to_thread(self._resolver.close)
        self._seen.left += [(fault, "the run had ended") for fault in self._clock.left]
        return self._seen

    def _interrupt(self) -> None:
        self._seen.interrupted = True
        with contextlib.suppress(ProcessLookupError):
            self._launcher.send_signal(signal.SIGINT)

    async def _launch(self, command: list[str]) -> None:
        self._launcher = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C at the terminal is passed on
        )
        self._launched.set()
        assert self._launcher.stdout is not None
        self._spawn(self._read_lines(self._launcher.stdout))

    async def _read_lines(self, output: asyncio.StreamReader) -> None:
        async for line in output:
            self._heard_at = time.monotonic()
            self._seen.lines.append(line.decode(errors="replace").rstrip("\n"))
            self._begun |= self._seen.lines[-1].startswith("started ")
            if " went on after " in self._seen.lines[-1] or "FAILED" in self._seen.lines[-1]:
                self._say(self._seen.lines[-1])

    def _say(self, what: str) -> None:
        self._tell(f"{time.time() - self._seen.began:7.1f} s  {what}")

    async def _look(self) -> bool:
        """Read new rows and lines, inject due faults; return True if the run is over."""
        now = time.monotonic()
        for step in self._rows.read():
            self._seen.steps.append((time.time(), step))
            self._clock.step_done(step, now)
            self._heard_at = now
        while not self._seen.interrupted and (fault := self._clock.due(now)) is not None:
            self._spawn(self._do(fault))
        if (code := self._launcher.returncode) is not None:
            if not self._launched.is_set() and not self._seen.interrupted:
                self._say("the same command again")
                await self._launch(self._again)
                return False
            self._seen.code = code
            return True
        if now - self._heard_at > SILENCE_LIMIT_S:
            self._say(f"no step and no word for {SILENCE_LIMIT_S:.0f} s: the run is ended")
            return True
        return False

    async def _do(self, fault: Fault) -> None:
        try:
            await self._way(fault.kind)(fault)
        except asyncio.CancelledError:
            if all(done.fault is not fault for done in self._seen.done):
                self._seen.left.append((fault, "the run ended before its target was there"))
            raise

    def _note(self, fault: Fault, what: str, note: str = "") -> InjectedFault:
        step = self._seen.steps[-1][1] if self._seen.steps else 0
        done = InjectedFault(fault, time.time(), step, note)
        self._seen.done.append(done)
        self._say(f"#{fault.number}, after step {step}: {what}" + (f" ({note})" if note else ""))
        return done

    async def _kill(self, fault: Fault) -> None:
        process = await self._find(fault.target)
        if fault.target == LAUNCHER:
            self._launched.clear()
        else:
            self._killed.add(process.pid)
        process.kill()
        done = self._note(fault, f"SIGKILL {fault.target}", f"pid {process.pid}")
        if done.kind == names.GENERATION_SERVER:
            self._spawn(self._await_requests(done, process.pid))

    async def _pause(self, fault: Fault) -> None:
        process = await self._find(fault.target)
        process.suspend()
        done = self._note(fault, f"SIGSTOP {fault.target} for {fault.seconds:g} s", f"pid {process.pid}")
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # killed meanwhile
                process.resume()
            done.over = time.time()

    async def _cut(self, fault: Fault) -> None:
        proxy = self._links.proxy(fault.target)
        proxy.refuses = True
        what = f"cut from {fault.target}, none let through for {fault.seconds:g} s"
        done = self._note(fault, what, f"{proxy.cut()} connections")
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            proxy.refuses = False
            done.over = time.time()

    async def _delay(self, fault: Fault) -> None:
        proxy = self._links.proxy(fault.target)
        proxy.delay_s = DELAY_S
        what = f"{DELAY_S:g} s late to and from {fault.target} for {fault.seconds:g} s"
        done = self._note(fault, what, f"{proxy.connections} connections")
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            proxy.delay_s = 0.0
            done.over = time.time()

    async def _fill_disk(self, fault: Fault) -> None:
        ballast = Ballast(self._run_dir.parent / f"{self._run_dir.name}.ballast")
        done = self._note(fault, f"no room on the disk for {fault.seconds:g} s")
        try:
            until = time.monotonic() + fault.seconds
            while time.monotonic() < until:
                ballast.grow()
                await asyncio.sleep(LOOK_S)
        finally:
            ballast.drop()
            done.over = time.time()

    def _way(self, kind: FaultKind) -> Callable[[Fault], Coroutine[Any, Any, None]]:
        return {
            FaultKind.kill: self._kill,
            FaultKind.pause: self._pause,
            FaultKind.cut: self._cut,
            FaultKind.delay: self._delay,
            FaultKind.full_disk: self._fill_disk,
        }[kind]

    async def _find(self, target: str) -> psutil.Process:
        """Return the run's current process of this name, once there is one: it may just be restarting."""
        if target == LAUNCHER:
            await self._launched.wait()
            return psutil.Process(self._launcher.pid)
        kind, _, index = target.partition("/")
        while True:
            with contextlib.suppress(NameResolveError, ValueError, psutil.NoSuchProcess, psutil.AccessDenied):
                status = names.WorkerStatus.decode(self._names().get(names.status_key(kind, int(index))))
                process = psutil.Process(status.pid)
                living = status.state in ("starting", "ready") and status.pid not in self._killed
                if living and _is_worker(process, target):
                    return process
            await asyncio.sleep(LOOK_S)

    def _names(self) -> NameResolver:
        """Return the run's name resolution.

        Raises:
            NameResolveError: the run has none yet.
        """
        if self._resolver is None:
            if not self._begun:  # until then its folder may be wiped
                raise NameResolveError("the run has not begun")
            self._resolver = open_resolver(self._config, self._run_dir, patience_s=0.0)
        return self._resolver

    async def _keep_links(self) -> None:
        while True:
            with contextlib.suppress(NameResolveError):  # the run has not begun, or its disk is full
                self._links.look(self._names())
            await asyncio.sleep(LINK_LOOK_S)

    async def _await_requests(self, done: InjectedFault, dead: int) -> None:
        """Note when the server that replaces the dead one gets requests, which means that it has the newest weights."""
        index = int(done.fault.target.partition("/")[2])
        http: JsonHttp | None = None
        try:
            while done.serves is None:
                await asyncio.sleep(LOOK_S)
                with contextlib.suppress(NameResolveError, HttpError, SecretError, OSError):
                    entry = names.GenerationServerEntry.decode(self._names().get(names.gen_server_key(index)))
                    if entry.pid == dead:
                        continue
                    if http is not None:
                        await http.close()
                    http = JsonHttp(self._security())  # another launch has another secret
                    url = self._names().get(names.MANAGER_KEY)
                    reply = await http.call("POST", f"{url}/status", timeout_s=_CALL_LIMIT_S, reply=StatusReply)
                    if any(server.url == entry.url and server.state == "serving" for server in reply.servers):
                        done.serves = time.time()
        finally:
            if http is not None:
                await http.close()

    def _security(self) -> HttpSecurity | None:
        return RunSecret.load(self._run_dir / SECRET_FILE).http() if self._config.system.encrypt else None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_worker(process: psutil.Process, target: str) -> bool:
    """True if the process is this worker; until it sets its title, its command line is compared."""
    arguments = process.cmdline()
    if " ".join(arguments).startswith(f"asyncrl {target} "):
        return True
    kind, _, index = target.partition("/")
    return "asyncrl.runtime.main" in arguments and arguments[arguments.index("asyncrl.runtime.main") + 1 :][:2] == [
        kind,
        index,
    ]


class _NewRows:
    """The steps of new rows in `file`, which a launch may truncate."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0

    def read(self) -> list[int]:
        """Return the steps of the rows added since the last call."""
        try:
            with self._file.open("rb") as stream:
                self._offset = min(self._offset, stream.seek(0, os.SEEK_END))
                stream.seek(self._offset)
                data = stream.read()
        except OSError:  # there is none yet
            return []
        whole, newline, _ = data.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        steps = [int(json.loads(line)["step"]) for line in whole.splitlines()]
        return [step for step in steps if step]
