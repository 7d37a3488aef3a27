"""`python -m asyncrl.launch attach RUN`: show a run that was started with `--detach`, and end it with Ctrl-C.

A detached run is the same command in a separate session: its launcher runs without a terminal, restarts processes that
die, and writes its output to `launcher.log` in the run's folder. This command shows that file and passes Ctrl-C on to
the launcher, which it finds as the trial's holder. The run continues if this command ends without Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from asyncrl.comm.files import is_held, make_private_folder, open_private_file
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import EXIT_FILE, LAUNCHER_LOCK_FILE, LAUNCHER_LOG, OBSERVED_DIR, run_dir_of
from asyncrl.launch.commands import refuse
from asyncrl.observe.status import ProcessHistory
from asyncrl.observe.tail import Appended
from asyncrl.runtime.settings import EXIT_FAILED, EXIT_OK, Resume
from asyncrl.runtime.supervisor import identity_of
from asyncrl.runtime.trials.claim import TrialError, detached_holder, is_here, read_holder
from asyncrl.runtime.trials.resume import changed_settings

START_LIMIT_S = 600.0
"""Longest time, in s, to watch a run that starts in the background until its processes have started."""
_LAST_LINES = 40
_LOOK_S = 0.2


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; return the exit code of the run, or that of a refusal if there is no run."""
    parser = argparse.ArgumentParser(
        prog=f"{program} attach", description="Show a run that was started with --detach; Ctrl-C ends it."
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    run_dir = parser.parse_args(argv).run.expanduser().resolve()
    try:
        code = attach(run_dir)
        if code is None:
            raise TrialError(f"{run_dir}: {_instead(run_dir)}")
    except TrialError as error:
        return refuse(error)
    return code


def _instead(run_dir: Path) -> str:
    """Say what `run_dir` is, since no detached run has it."""
    holder = read_holder(run_dir)
    if holder is None:
        return "no run of this user has this folder; give <fileroot>/<experiment_name>/<trial_name>"
    if is_held(run_dir / LAUNCHER_LOCK_FILE):
        return (
            f"pid {holder.pid} on {holder.host} runs there in its own terminal, so nothing attaches to it; `dashboard` "
            "shows it, Ctrl-C in its terminal ends it"
        )
    return "no run is active there; the command that started it resumes it"


def detach(command: Sequence[str], run_dir: Path) -> int:
    """Start `command` in the background; return once its processes have started, or it has ended."""
    make_private_folder(run_dir)
    log = run_dir / LAUNCHER_LOG
    if log.exists():
        os.replace(log, log.with_name(f"{LAUNCHER_LOG}.1"))
    with open(open_private_file(log, os.O_WRONLY | os.O_APPEND), "wb") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.launch", *command, "--detached", "logging.display=plain"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    shown, observed = Appended(log), ProcessHistory(run_dir / OBSERVED_DIR, "launcher-0")
    waited_s = 0.0
    while waited_s < START_LIMIT_S:
        try:
            return launcher.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            waited_s += _LOOK_S
        finally:
            started = launcher.pid in observed.launches()
            _show(shown.read())
        if started:
            break
    print(
        f"pid {launcher.pid} continues in the background; the same command, or `attach {run_dir}`, shows it, and "
        "Ctrl-C there ends it",
        flush=True,
    )
    return EXIT_OK


def attach(run_dir: Path) -> int | None:
    """Show the detached run in `run_dir` until it ends; return its exit code, None if there is no such run.

    Raises:
        TrialError: it runs on another host or in another container.
    """
    holder = detached_holder(run_dir)
    if holder is None:
        return None
    if not is_here(holder):
        raise TrialError(
            f"{run_dir} is running as pid {holder.pid} on {holder.host}: on another host, or in another container, "
            f"which this one cannot signal; attach there. Its output is in {run_dir / LAUNCHER_LOG}"
        )
    try:
        launcher = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return None
    try:
        identity = identity_of(holder.pid)  # of the same process that the descriptor refers to
        if identity is None or identity.started != holder.started:
            return None
        print(
            f"attached to pid {holder.pid}, running since {holder.since}; Ctrl-C stops it after a checkpoint; "
            "closing the terminal leaves it running",
            flush=True,
        )
        with _passing_on(launcher, signal.SIGINT):
            output = Appended(run_dir / LAUNCHER_LOG)
            _show(output.read()[-_LAST_LINES:])
            _follow(launcher, output)
    finally:
        os.close(launcher)
    with contextlib.suppress(OSError, ValueError):
        return int((run_dir / EXIT_FILE).read_text())
    return EXIT_FAILED  # it was killed


def attach_again(config: ExperimentConfig) -> int | None:
    """Show the trial's detached run until it ends; return its exit code, None if there is no such run.

    Raises:
        TrialError: the run has other settings than `config`, or `attach` refuses it.
    """
    run_dir = run_dir_of(config)
    if config.resume != Resume.auto:
        raise TrialError(f"resume={str(config.resume)!r}: {run_dir} is running; `attach {run_dir}` and Ctrl-C end it")
    if changes := changed_settings(run_dir, config):
        listed = "; ".join(map(str, changes))
        raise TrialError(f"{run_dir} is running with other settings ({listed}); `attach {run_dir}` shows it")
    return attach(run_dir)


def _follow(launcher: int, output: Appended) -> None:
    """Show the lines that the launcher writes, until it ends."""
    end = select.poll()
    end.register(launcher, select.POLLIN)
    with contextlib.suppress(BrokenPipeError):  # `attach RUN | head`
        while not end.poll(1000 * _LOOK_S):
            _show(output.read())
        _show(output.read())


def _show(lines: Sequence[bytes]) -> None:
    for line in lines:
        print(line.decode(errors="replace"), flush=True)


@contextmanager
def _passing_on(launcher: int, number: signal.Signals) -> Iterator[None]:
    def pass_on(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(launcher, number)

    former = signal.signal(number, pass_on)
    try:
        yield
    finally:
        signal.signal(number, former)
