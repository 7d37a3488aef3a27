"""Inject the faults of a plan into a run. Any process with the user's rights could cause them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil

from asyncrl.comm import names
from asyncrl.verify.chaos.fault_costs import LAUNCHER, InjectedFault
from asyncrl.verify.chaos.fault_plan import DELAY_S, Fault, FaultKind
from asyncrl.verify.chaos.full_disk import Ballast
from asyncrl.verify.chaos.links import Links
from asyncrl.verify.chaos.process_targets import LOOK_S, ProcessTargets
from asyncrl.verify.chaos.run_launcher import RunLauncher


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
        ways: dict[FaultKind, Callable[[Fault], Coroutine[Any, Any, None]]] = {
            FaultKind.kill: self._kill,
            FaultKind.pause: self._pause,
            FaultKind.cut: self._cut,
            FaultKind.delay: self._delay,
            FaultKind.full_disk: self._fill_disk,
        }
        await ways[fault.kind](fault)

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
        done = self._note(fault, f"no room on the disk for {fault.seconds:g} s", "")
        try:
            until = time.monotonic() + fault.seconds
            while time.monotonic() < until:
                ballast.grow()
                await asyncio.sleep(LOOK_S)
        finally:
            ballast.drop()
            done.over = time.time()

    async def _find(self, target: str) -> psutil.Process:
        return await (self._launcher.find() if target == LAUNCHER else self._processes.find(target))
