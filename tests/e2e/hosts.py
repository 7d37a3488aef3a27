"""Runs over several hosts, which are all this machine: their settings, and their processes, whoever started them."""

from __future__ import annotations

import os
from typing import Any

import psutil

from .clusters import await_that

HOSTS = (
    "[{address: 127.0.0.1, runs: [master_worker, model_worker, gserver_manager]},"
    "{name: %s, address: 127.0.0.2, runs: [generation_server]},"
    "{name: %s, address: 127.0.0.3, runs: [rollout_worker]}]"
)
"""An address each, as hosts have; the launcher's own has no name."""


def over(launcher: str, first: str, second: str, *arguments: str) -> dict[str, Any]:
    """Settings of a run over three hosts, in a trial of its launcher's own: others may go on beside it."""
    settings = {
        "trial_name": f"hosts_{launcher}",
        "system__launcher": launcher,
        "system__hosts": HOSTS % (first, second),
    }
    return settings | ({"system__launcher_args": str(list(arguments))} if arguments else {})


def with_python(settings: dict[str, Any], python: str) -> dict[str, Any]:
    """`settings` with this interpreter on all hosts but the launcher's own."""
    hosts = settings["system__hosts"].replace("{name:", f"{{python: '{python}', name:")
    return settings | {"system__hosts": hosts}


def titled(process: psutil.Process | None) -> str:
    """Its command line; nothing where it has ended."""
    try:
        return "" if process is None else " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def processes_of(run: Any) -> list[psutil.Process]:
    """All processes of this run on this machine, wherever their folders are."""
    trial, folders = f"[{run.run_dir.parent.name}/{run.run_dir.name}]", (os.getcwd(), str(run.run_dir.parents[1]))
    found = []
    for process in psutil.process_iter():
        try:
            if titled(process).startswith("asyncrl ") and trial in titled(process):
                found += [process] if process.cwd().startswith(folders) else []
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def assert_gone(run: Any) -> None:
    """Nothing of it is left on this machine."""
    await_that(lambda: not processes_of(run), f"the end of {processes_of(run)}")
