"""Run an experiment as its user would, inject the faults of a plan, watch the run until its end, and report.

The run is a child process, `python -m asyncrl.launch EXPERIMENT ...`. All information about it comes from its files,
from name resolution and from the operating system. Any process with the user's rights could cause these faults. After
a fault has killed the launcher, the same command is run again, as a user or a supervisor would do. The run gets no
other help.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import psutil
from rich import box
from rich.table import Table

from asyncrl.comm import names
from asyncrl.comm.http_client import HttpError, JsonHttp
from asyncrl.comm.name_resolve import NameResolveError, NameResolver
from asyncrl.comm.security import HttpSecurity, RunSecret, SecretError
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import METRICS_FILE, OBSERVED_DIR, RESTARTS_FILE, SECRET_FILE, run_dir_of
from asyncrl.manager.messages import StatusReply
from asyncrl.observe.status import ProcessHistory
from asyncrl.observe.tail import JsonlTail
from asyncrl.runtime.trials.claim import open_resolver
from asyncrl.verify.chaos.faults import DELAY_S, LAUNCHER, Fault, FaultKind, InjectedFault, PlanClock
from asyncrl.verify.chaos.links import Links

LARGEST_BYTES = 2 << 30
"""Size in bytes above which a file system is not filled: others use it too, and it would take long."""
_BLOCK = bytes(1 << 20)
_LEAST = bytes(1 << 12)


def why_no_disk_is_filled(folder: Path) -> str | None:
    """Return the reason why the file system of `folder` must not be filled, with the fix; None if it may be filled."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    size = shutil.disk_usage(existing).total
    if size <= LARGEST_BYTES:
        return None
    return (
        f"fileroot={str(folder)!r} lies on a file system of {size / 2**30:,.0f} GiB, and only file systems of at most "
        f"{LARGEST_BYTES / 2**30:.0f} GiB are filled; to make a small one without privileges: "
        "unshare --map-root-user --mount sh -c "
        "'mount -t tmpfs -o size=512m,mode=0700 tmpfs DIR && COMMAND fileroot=DIR'"
    )


class Ballast:
    """A file that takes all free space until `drop`. Call `grow` again when others may have freed space."""

    def __init__(self, file: Path) -> None:
        self._path = file
        self._file: int | None = None

    def grow(self) -> None:
        """Take all free space."""
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for block in (_BLOCK, _LEAST):
            with contextlib.suppress(OSError):  # no space is left for a block
                while True:
                    os.write(self._file, block)

    def drop(self) -> None:
        """Free the space."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._path.unlink(missing_ok=True)


LOOK_S = 0.05
"""Time between two checks of the run."""
_CALL_LIMIT_S = 2.0


class ProcessTargets:
    """The workers of a run, and its name resolution once the run has begun."""

    def __init__(self, config: ExperimentConfig, launcher: RunLauncher) -> None:
        self._config, self._run_dir, self._launcher = config, run_dir_of(config), launcher
        self._resolver: NameResolver | None = None
        self._killed: set[int] = set()
        """Ids of the killed processes; the kernel reuses an id only after thousands of others."""

    def names(self) -> NameResolver:
        """Return the run's name resolution.

        Raises:
            NameResolveError: the run has none yet.
        """
        if self._resolver is None:
            if not self._launcher.begun:  # until then its folder may be wiped
                raise NameResolveError("the run has not begun")
            self._resolver = open_resolver(self._config, self._run_dir, patience_s=0.0)
        return self._resolver

    async def find(self, target: str) -> psutil.Process:
        """Return the current process of the worker `target`. If it is just restarting, wait for the new process."""
        kind, _, index = target.partition("/")
        while True:
            with contextlib.suppress(NameResolveError, ValueError, psutil.NoSuchProcess, psutil.AccessDenied):
                status = names.WorkerStatus.decode(self.names().get(names.status_key(kind, int(index))))
                process = psutil.Process(status.pid)
                living = status.state in ("starting", "ready") and status.pid not in self._killed
                if living and _is_worker(process, target):
                    return process
            await asyncio.sleep(LOOK_S)

    def kill(self, process: psutil.Process) -> None:
        """Kill a worker; `find` returns its successor from now on."""
        self._killed.add(process.pid)
        process.kill()

    async def replaced(self, index: int, dead: int) -> None:
        """Return when the generation server `index` that replaces the process `dead` gets requests.

        The server has the newest weights then.
        """
        http: JsonHttp | None = None
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                with contextlib.suppress(NameResolveError, HttpError, SecretError, OSError):
                    entry = names.GenerationServerEntry.decode(self.names().get(names.gen_server_key(index)))
                    if entry.pid == dead:
                        continue
                    if http is not None:
                        await http.close()
                    http = JsonHttp(self._security())  # another launch has another secret
                    url = self.names().get(names.MANAGER_KEY)
                    reply = await http.call("POST", f"{url}/status", timeout_s=_CALL_LIMIT_S, reply=StatusReply)
                    if any(server.url == entry.url and server.state == "serving" for server in reply.servers):
                        return
        finally:
            if http is not None:
                await http.close()

    async def close(self) -> None:
        """Close name resolution."""
        if self._resolver is not None:
            await asyncio.to_thread(self._resolver.close)

    def _security(self) -> HttpSecurity | None:
        return RunSecret.load(self._run_dir / SECRET_FILE).http() if self._config.system.encrypt else None


def _is_worker(process: psutil.Process, target: str) -> bool:
    """True if the process is this worker. Before it sets its title, its command line is compared."""
    arguments = process.cmdline()
    if " ".join(arguments).startswith(f"asyncrl {target} "):
        return True
    kind, _, index = target.partition("/")
    return "asyncrl.runtime.main" in arguments and arguments[arguments.index("asyncrl.runtime.main") + 1 :][:2] == [
        kind,
        index,
    ]


class RunLauncher:
    """The current launcher of the run.

    Args:
        command: starts the run.
        again: continues the run after its launcher died.
        run_dir: the run's folder.
        on_line: called with each line that it prints.

    Attributes:
        heard_at: monotonic time of the newest line, in s.
    """

    def __init__(
        self, command: Sequence[str], again: Sequence[str], run_dir: Path, on_line: Callable[[str], None]
    ) -> None:
        self._commands = chain([command], repeat(again))
        self._observed = ProcessHistory(run_dir / OBSERVED_DIR, "launcher-0")
        self._begun = False
        self.heard_at = time.monotonic()
        self._on_line = on_line
        self._launched = asyncio.Event()
        """Set while a launcher exists that has not been killed."""
        self._process: asyncio.subprocess.Process | None = None
        """The newest launcher; None before the first one started."""
        self._reading: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the run, or continue it."""
        self._process = process = await asyncio.create_subprocess_exec(
            *next(self._commands),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C at the terminal reaches it only through `interrupt`
        )
        self._launched.set()
        assert process.stdout is not None
        reading = asyncio.create_task(self._read_lines(process.stdout))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)

    @property
    def begun(self) -> bool:
        """True once the first launcher has started the run's processes."""
        if not self._begun and self._process is not None:
            self._begun = self._process.pid in self._observed.launches()
        return self._begun

    @property
    def code(self) -> int | None:
        """Return the exit code; None while the launcher runs, and before the first one started."""
        return None if self._process is None else self._process.returncode

    @property
    def killed(self) -> bool:
        """True from `kill` until the next `start`."""
        return not self._launched.is_set()

    async def find(self) -> psutil.Process:
        """Return the launcher, once there is one that has not been killed."""
        await self._launched.wait()
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def kill(self, process: psutil.Process) -> None:
        """Kill the launcher; the run is continued by another one."""
        self._launched.clear()
        process.kill()

    def interrupt(self) -> None:
        """Send the launcher Ctrl-C."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGINT)

    async def close(self) -> None:
        """End the launcher if it still runs, and stop reading lines."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        for reading in self._reading:
            reading.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)

    async def _read_lines(self, output: asyncio.StreamReader) -> None:
        async for line in output:
            self.heard_at = time.monotonic()
            self._on_line(line.decode(errors="replace").rstrip("\n"))


class FaultInjector:
    """Injects faults, several at a time.

    Args:
        links: the processes behind proxies.
        run_dir: folder of the run, whose file system is filled.
        note: called with an injected fault, its description, and details; returns its record.
    """

    def __init__(
        self,
        launcher: RunLauncher,
        processes: ProcessTargets,
        links: Links,
        run_dir: Path,
        note: Callable[[Fault, str, str], InjectedFault],
    ) -> None:
        self._launcher, self._processes, self._links, self._run_dir = launcher, processes, links, run_dir
        self._note = note

    async def inject(self, fault: Fault) -> None:
        """Inject `fault` once its target exists; return when the fault is over."""
        handlers: dict[FaultKind, Callable[[Fault], Coroutine[Any, Any, None]]] = {
            FaultKind.kill: self._kill,
            FaultKind.pause: self._pause,
            FaultKind.cut: self._cut,
            FaultKind.delay: self._delay,
            FaultKind.full_disk: self._fill_disk,
        }
        await handlers[fault.kind](fault)

    async def _kill(self, fault: Fault) -> None:
        process = await self._find(fault.target)
        (self._launcher if fault.target == LAUNCHER else self._processes).kill(process)
        done = self._note(fault, f"SIGKILL {fault.target}", f"pid {process.pid}")
        if done.kind == names.GENERATION_SERVER:
            await self._processes.replaced(int(fault.target.partition("/")[2]), process.pid)
            done.serves = time.time()

    async def _pause(self, fault: Fault) -> None:
        process = await self._find(fault.target)
        process.suspend()

        def resume() -> None:
            with contextlib.suppress(psutil.NoSuchProcess):  # killed meanwhile
                process.resume()

        what = f"SIGSTOP {fault.target} for {fault.seconds:g} s"
        await self._for_a_while(fault, what, f"pid {process.pid}", resume)

    async def _cut(self, fault: Fault) -> None:
        proxy = self._links.proxy(fault.target)
        proxy.refuses = True
        what = f"cut from {fault.target}, none let through for {fault.seconds:g} s"
        await self._for_a_while(fault, what, f"{proxy.cut()} connections", lambda: setattr(proxy, "refuses", False))

    async def _delay(self, fault: Fault) -> None:
        proxy = self._links.proxy(fault.target)
        proxy.delay_s = DELAY_S
        what = f"{DELAY_S:g} s late to and from {fault.target} for {fault.seconds:g} s"
        await self._for_a_while(fault, what, f"{proxy.connections} connections", lambda: setattr(proxy, "delay_s", 0.0))

    async def _fill_disk(self, fault: Fault) -> None:
        ballast = Ballast(self._run_dir.parent / f"{self._run_dir.name}.ballast")
        what = f"no room on the disk for {fault.seconds:g} s"
        await self._for_a_while(fault, what, "", ballast.drop, meanwhile=ballast.grow)

    async def _for_a_while(
        self,
        fault: Fault,
        what: str,
        details: str,
        undo: Callable[[], None],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Note the fault, and undo it after its seconds, or if the run ends before; call `meanwhile` repeatedly."""
        done = self._note(fault, what, details)
        try:
            until = time.monotonic() + fault.seconds
            while (left_s := until - time.monotonic()) > 0:
                meanwhile()
                await asyncio.sleep(min(left_s, LOOK_S))
        finally:
            undo()
            done.over = time.time()

    async def _find(self, target: str) -> psutil.Process:
        return await (self._launcher.find() if target == LAUNCHER else self._processes.find(target))


LINK_LOOK_S = 0.01
"""Time in seconds between two checks of addresses. A process that reads an address before it is replaced bypasses the
proxy.
"""
SILENCE_LIMIT_S = 600.0
"""Time in seconds without a step or a printed line after which a run will not end by itself."""
_LINES_KEPT = 60


@dataclass(slots=True)
class Watched:
    """Observations of a run.

    Attributes:
        code: exit code of its last launcher; None if it had to be killed.
        done: the injected faults.
        left: the faults that were not injected, with the reason.
        steps: for each row of metrics, the time when it was seen, and its step.
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
        config: the run's settings, as its launcher resolves them.
        command: starts the run.
        again: continues the run after its launcher died.
        links: the processes behind proxies, and their entries in name resolution.
        tell: called with lines for the terminal.
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
        self._tell = tell
        self._clock = PlanClock(plan)
        self._seen = Watched(time.time())
        self._stepped_at = time.monotonic()
        run_dir = run_dir_of(config)
        self._rows = JsonlTail(run_dir / METRICS_FILE)
        self._restarts = JsonlTail(run_dir / RESTARTS_FILE)
        self._restarts.read()  # those of earlier runs
        self._launcher = RunLauncher(command, again, run_dir, self._seen.lines.append)
        self._processes = ProcessTargets(config, self._launcher)
        self._links = Links(config.system.host, config.system.lease_s, links)
        self._injector = FaultInjector(self._launcher, self._processes, self._links, run_dir, self._note)

    async def run(self) -> Watched:
        """Run it to its end."""
        await self._links.start()
        tasks = {asyncio.create_task(self._keep_links())}
        try:
            await self._launcher.start()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
            while True:
                for fault in self._due():
                    tasks.add(task := asyncio.create_task(self._inject(fault)))
                    task.add_done_callback(tasks.discard)
                if await self._is_over():
                    break
                await asyncio.sleep(LOOK_S)
        finally:
            for task in tasks:
                task.cancel()
            await self._launcher.close()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._links.close()
            await self._processes.close()
        self._seen.left += [(fault, "the run had ended") for fault in self._clock.left]
        return self._seen

    def _interrupt(self) -> None:
        self._seen.interrupted = True
        self._launcher.interrupt()

    def _say(self, what: str) -> None:
        self._tell(f"{time.time() - self._seen.began:7.1f} s  {what}")

    def _due(self) -> Iterator[Fault]:
        """Read new rows; yield the faults that are due."""
        now = time.monotonic()
        for step in (row["step"] for row in self._rows.read() if row["step"]):
            self._seen.steps.append((time.time(), step))
            self._clock.step_done(step, now)
            self._stepped_at = now
        for line in self._restarts.read():
            if "went_on" in line:
                self._say(f"{line['went_on']} went on after {line['seconds']:.1f} s")
        while not self._seen.interrupted and (fault := self._clock.due(now)) is not None:
            yield fault

    async def _is_over(self) -> bool:
        """Return True if the run is over; continue it if its launcher was killed."""
        if (code := self._launcher.code) is not None:
            if self._launcher.killed and not self._seen.interrupted:
                self._say("starting the same command again")
                await self._launcher.start()
                return False
            self._seen.code = code
            return True
        if time.monotonic() - max(self._launcher.heard_at, self._stepped_at) > SILENCE_LIMIT_S:
            self._say(f"no step and no printed line for {SILENCE_LIMIT_S:.0f} s: ending the run")
            return True
        return False

    async def _inject(self, fault: Fault) -> None:
        try:
            await self._injector.inject(fault)
        except asyncio.CancelledError:
            if all(done.fault is not fault for done in self._seen.done):
                self._seen.left.append((fault, "the run ended before its target was there"))
            raise
        except (OSError, psutil.Error) as error:  # the target has just ended, or the disk has no room for the ballast
            if all(done.fault is not fault for done in self._seen.done):
                self._seen.left.append((fault, f"it could not be injected: {error}"))

    def _note(self, fault: Fault, what: str, note: str) -> InjectedFault:
        step = self._seen.steps[-1][1] if self._seen.steps else 0
        done = InjectedFault(fault, time.time(), step, note)
        self._seen.done.append(done)
        self._say(f"#{fault.number}, after step {step}: {what}" + (f" ({note})" if note else ""))
        return done

    async def _keep_links(self) -> None:
        while True:
            with contextlib.suppress(NameResolveError):  # the run has not begun, or its disk is full
                self._links.look(self._processes.names())
            await asyncio.sleep(LINK_LOOK_S)


WIDTH = 80
_SHORT = {
    names.GENERATION_SERVER: "server",
    names.ROLLOUT_WORKER: "worker",
    names.GSERVER_MANAGER: "manager",
    names.MASTER_WORKER: "master",
    names.MODEL_WORKER: "rank",
}


def table(watched: Watched) -> Table:
    """Return a row for each fault, in the order in which they were injected."""
    shown = Table(box=box.SIMPLE_HEAD, width=WIDTH, padding=0, show_edge=False)
    shown.add_column("\n\n#", justify="right")
    shown.add_column("\nat\ns", justify="right", no_wrap=True)
    shown.add_column("\nafter\nstep", justify="right", no_wrap=True)
    shown.add_column("\n\nfault", ratio=1, no_wrap=True)
    shown.add_column("at\nwork\nin s", justify="right", no_wrap=True)
    shown.add_column("next\nstep\nin s", justify="right", no_wrap=True)
    shown.add_column("\nrollouts\nlost", justify="right", no_wrap=True)
    shown.add_column("\ntokens\nlost", justify="right", no_wrap=True)
    shown.add_column("\nsteps\nagain", justify="right", no_wrap=True)
    for done in sorted(watched.done, key=lambda each: each.at):
        shown.add_row(
            str(done.fault.number),
            f"{done.at - watched.began:.0f}",
            str(done.after_step),
            _what(done),
            _back(done),
            _seconds(done.next_step_s),
            _count(done.rollouts),
            _count(done.tokens),
            _count(done.steps_again),
        )
    return shown


def verdict(watched: Watched, wrong_counts: str | None, findings: Sequence[str]) -> list[str]:
    """Return all reasons why the run failed; empty if it passed. `wrong_counts`: the error in the rollout counts, if
    any.
    """
    wrong = []
    if watched.interrupted:
        wrong.append("it was interrupted")
    elif watched.code is None:
        wrong.append("it did not end by itself: no step and no printed line for too long")
    elif watched.code:
        wrong.append(f"it did not finish by itself: its launcher ended with {watched.code}")
    if wrong_counts is not None:
        wrong.append(wrong_counts)
    if findings:
        wrong.append(f"the audit has {len(findings)} findings")
    wrong += [f"#{fault.number} ({fault.kind} {fault.target}) was not done: {why}" for fault, why in watched.left]
    return wrong


def _what(done: InjectedFault) -> str:
    kind, _, index = done.fault.target.partition("/")
    target = f"{_SHORT.get(kind, kind)}/{index}" if index else kind
    return {
        FaultKind.kill: f"SIGKILL {target}",
        FaultKind.pause: f"SIGSTOP {target}, {done.fault.seconds:.0f} s",
        FaultKind.cut: f"cut {target}, {done.fault.seconds:.0f} s",
        FaultKind.delay: f"late {target}, {done.fault.seconds:.0f} s",
        FaultKind.full_disk: f"disk full, {done.fault.seconds:.0f} s",
    }[done.fault.kind]


def _back(done: InjectedFault) -> str:
    if done.fault.kind is not FaultKind.kill:
        return "-"
    if done.overtaken_by is not None and done.at_work_s is None:
        return f"#{done.overtaken_by}"
    return _seconds(done.at_work_s)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _count(value: int) -> str:
    return f"{value:,}" if value else "-"
