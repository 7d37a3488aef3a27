"""A rehearsal of the user's code, in parallel with the other checks of a start; see `asyncrl.rollout.rehearsal`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from asyncrl.api.trajectory import WON
from asyncrl.comm import names
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import write_run_config
from asyncrl.config.setting import ConfigError
from asyncrl.rollout.rehearsal import RehearsalOutcome

LIMIT_S = 60.0
_SWITCH = "if only made-up answers do this, set rollout.rehearse=false"


@contextmanager
def rehearsed(config: ExperimentConfig) -> Iterator[Callable[[], list[str]]]:
    """Begin a rehearsal. The function given to the block waits for its end and returns notes for the user.

    If all RolloutWorkers are on other hosts nothing is rehearsed, as this host may lack what their code needs. A run
    that replays kept samples calls no user code.

    Raises:
        ConfigError: by the given function, if the run would fail.
    """
    if not config.rollout.rehearse or config.samples.replay or not _plays_here(config):
        yield list
        return
    with tempfile.TemporaryDirectory(prefix="asyncrl-rehearsal-") as name:
        folder = Path(name)
        write_run_config(config, folder)
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.rollout.rehearsal", name],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        try:
            yield lambda: _found(process, folder, config)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all processes that user code started
            process.kill()
            process.wait()


def _plays_here(config: ExperimentConfig) -> bool:
    hosts = [host for host in config.system.hosts if names.ROLLOUT_WORKER in host.runs]
    return not hosts or any(not host.name for host in hosts)


def _found(process: subprocess.Popen[bytes], folder: Path, config: ExperimentConfig) -> list[str]:
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return [f"rehearsal: the first row was not played to its end within {LIMIT_S:g} s; the run begins all the same"]
    outcome = RehearsalOutcome.read(folder)
    if outcome is None:
        said = (folder / "output").read_text(errors="replace").strip().splitlines()[-5:]
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise ConfigError("\n".join([f"rehearsal: the process that played the first row {ended}; {_SWITCH}", *said]))
    if outcome.error is not None:
        where = [f"rehearsal: {line}" for line in outcome.where]
        switch = [f"rehearsal: the first row was played with made-up answers; {_SWITCH}"] if where else []
        raise ConfigError("\n".join([outcome.error, *where, *switch]))
    lost = [
        f"rehearsal: {count} of {config.group_size} made-up answers to the first row were lost: {name}"
        for name, count in outcome.lost.items()
    ]
    untrained = [
        f"rehearsal: the agent returned no sample of policy {policy!r} for the first row; it is trained on those that "
        f"client.policy({policy!r}).samples(reward) returns"
        for policy in outcome.untrained
    ]
    unrated = [
        f"rehearsal: no sample of the first row has the metric {WON}{pool}, the result against policy {pool!r} from "
        "0 to 1, by which versions.pick=prioritised chooses; without it each member is as likely"
        for pool in outcome.unrated
    ]
    unasked = [
        f"rehearsal: nothing asked policy {policy!r} for the first row; its servers run all the same, so leave it out "
        f"of `policies` if client.policy({policy!r}) is never asked"
        for policy in outcome.unasked
    ]
    return lost + untrained + unrated + unasked + [f"rehearsal: {note}" for note in outcome.unrewarded]
