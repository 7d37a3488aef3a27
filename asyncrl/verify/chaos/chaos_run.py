"""Run an experiment as its user would, inject the faults of a plan, and watch the run until its end.

The run is a child process, `python -m asyncrl.launch EXPERIMENT ...`. All information about it comes from its files and
from name resolution. Any process with the user's rights could cause these faults. After a fault has killed the
launcher, the same command is run again, as a user or a supervisor would do. The run gets no other help.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from asyncrl.comm.name_resolve import NameResolveError
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import METRICS_FILE, RESTARTS_FILE, run_dir_of
from asyncrl.observe.history.tail import JsonlTail
from asyncrl.verify.chaos.fault_costs import InjectedFault
from asyncrl.verify.chaos.fault_injector import FaultInjector
from asyncrl.verify.chaos.fault_plan import Fault, PlanClock
from asyncrl.verify.chaos.links import Links
from asyncrl.verify.chaos.process_targets import LOOK_S, ProcessTargets
from asyncrl.verify.chaos.run_launcher import RunLauncher

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
        self._rows = _NewRows(run_dir / METRICS_FILE)
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
        for step in self._rows.read():
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
