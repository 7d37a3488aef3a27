"""docs/questions.md: questions that users of such systems asked, each answered by one command on a recorded run.

    python benchmarks/questions.py [--only RUN ...] [--out docs/questions.md]

Each run is the demo, real and short, with what the questions are about: a setting, user code, or something that is done
to it from outside while it goes on. The commands read the files that it left, or leaves meanwhile. What they print
goes into the page, shortened to the lines that answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from doctor import COMMON, USER_CODE, processes

from asyncrl.config.load import load_supervised
from asyncrl.trainer.supervised.base_model import ensure_base_model

MORE_CODE = """

from asyncrl.plugins.agents.single_turn import SingleTurnAgent

KEPT = []


def keeps(data, completion):
    KEPT.append(bytearray(b"x" * (8 << 20)))
    return float(completion.count("1"))


def hangs(data, completion):
    time.sleep(3600)


class Straggler(SingleTurnAgent):
    "Its seventieth prompt never ends."

    async def run_group(self, prompt, make_env, client):
        if prompt.order == 70:
            await asyncio.sleep(3600)
        return await super().run_group(prompt, make_env, client)
"""
FOUND_S, LOOK_S, RUN_S = 240.0, 5.0, 300.0
LINES = 24


@dataclass(frozen=True)
class Run:
    """A run to record.

    Attributes:
        what: of it, for people.
        settings: beside those of `doctor.COMMON`.
        steps: that it trains.
        disturb: called with the run's folder once it has `after` steps; the doctor is then asked until it names `until`,
            and the run is ended. Without: it goes on to its end.
    """

    what: str
    settings: tuple[str, ...] = ()
    steps: int = 14
    disturb: Callable[[Path], None] | None = None
    after: int = 6
    until: str = ""
    experiment: str = "async_ppo"
    base: str = "sft"


@dataclass(frozen=True)
class Question:
    """What was asked, where, the run that answers and the command; of its output the lines from one with `since` on."""

    text: str
    where: str
    run: str
    command: str = "doctor RUN"
    since: str = ""
    lines: int = 7


def stop(kind: str) -> Callable[[Path], None]:
    """Suspend the processes of a kind, as a hang does."""

    def suspend(run: Path) -> None:
        for process in processes(run, kind):
            process.suspend()

    return suspend


def kill_all(run: Path) -> None:
    """Kill all processes of the run at once, as a host that goes down does."""
    launcher = next(each for each in psutil.process_iter(["cmdline"]) if f"trial_name={run.name}" in (each.info["cmdline"] or []))
    tree = [launcher, *launcher.children(recursive=True)]
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def nothing(run: Path) -> None:
    """Only wait."""
