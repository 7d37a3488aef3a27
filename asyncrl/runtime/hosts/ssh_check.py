"""Checks the hosts of a run over ssh before anything starts: each is logged in to once, all at the same time.

An error that a retry cannot fix is reported as a wrong setting: unknown name, refused login, unknown host key, no
interpreter or no asyncrl there, an address of another host, a folder that is not shared. A host that does not answer is
reported too, as a failure that may pass.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.runtime.exit_codes import EXIT_LOST
from asyncrl.runtime.hosts import host_probe
from asyncrl.runtime.hosts.host_probe import HostFindings, Question, bind_error
from asyncrl.runtime.launchers.ssh import ssh_command
from asyncrl.runtime.settings import SSH, HostConfig
from asyncrl.runtime.trials.resume import TrialError

_LIMIT_S = 90.0
"""For the answer of a host: ssh tries for 20 s, and a login may start slowly."""
_AT_ONCE = 32
"""Logins at the same time."""
_NO_PROGRAM = (126, 127)
"""Exit codes of a shell that cannot run a command."""
_OLDEST_PYTHON = (3, 11)
CLOCK_S = 1.0
"""Difference between two hosts' clocks from which times of one run cannot be compared any more."""
_REFUSALS = {
    "Name or service not known": "ssh knows no host of this name; correct it, or add an entry to ~/.ssh/config",
    "Permission denied": "the host refuses the login; add your public key to the host's authorized_keys, or name "
    "user and key in ~/.ssh/config",
    "Host key verification failed": "ssh does not know the host's key, or knows another; log in once by hand, and "
    "compare the key",
}
"""Errors of ssh that a retry cannot fix, by ssh's words."""


class _Findings(NamedTuple):
    """Errors of one host: those that need other settings, and those that may pass; and what the user should know."""

    refused: list[str]
    silent: list[str]
    notes: tuple[str, ...] = ()


def check_hosts(config: ExperimentConfig) -> list[str]:
    """Check that processes can be started on each host of `system.launcher=ssh`; nothing happens with others.

    Returns:
        A sentence for each host whose clock differs from this one's.

    Raises:
        ConfigError: a host cannot be used with these settings.
        TrialError: a host does not answer now.
    """
    if config.system.launcher != SSH:
        return []
    fileroot = Path(config.fileroot).expanduser().resolve()
    fileroot.mkdir(parents=True, exist_ok=True)
    marker = fileroot / f".asyncrl-{secrets.token_hex(8)}"
    marker.touch(mode=0o600)
    try:
        with ThreadPoolExecutor(_AT_ONCE) as logins:
            check = partial(_check, config, fileroot, marker.name)
            found = list(logins.map(check, itertools.count(), config.system.hosts))
    finally:
        marker.unlink(missing_ok=True)
    refused, silent = ([line for findings in found for line in findings[side]] for side in (0, 1))
    if refused:
        raise ConfigError("\n".join(refused + silent))
    if silent:
        raise TrialError("\n".join(silent))
    return [line for findings in found for line in findings.notes]


def _check(config: ExperimentConfig, fileroot: Path, marker: str, number: int, host: HostConfig) -> _Findings:
    setting = f"system.hosts[{number}]"
    if not host.name:
        return _Findings(list(_address_fault(setting, host, bind_error(host.address))), [])
    shared = config.system.shared_filesystem
    question = Question(
        host.address, os.getcwd() if shared else "", host.fileroot or str(fileroot), marker if shared else ""
    )
    python = host.python or sys.executable
    command = ssh_command(config.system.launcher_args, host.name, [python, "-I", "-S", host_probe.__file__])
    order = json.dumps(question._asdict()) + "\n"
    asked_at = time.time()
    try:
        ended = subprocess.run(command, input=order, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return _Findings([], [f"{setting}.name={host.name!r}: no answer by ssh within {_LIMIT_S:g} s; is the host up?"])
    words = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    if ended.returncode == 0:
        try:
            answer = HostFindings(**json.loads(ended.stdout.splitlines()[-1]))  # a login may print lines before
        except (IndexError, ValueError, TypeError):
            return _Findings(
                [
                    f"{setting}.name={host.name!r}: the login succeeded, and ran another command than the given one; "
                    f"remove `command=` for this key from authorized_keys, or ForceCommand from sshd_config ({words})"
                ],
                [],
            )
        clock = _clock_note(host, asked_at, answer.at, time.time())
        return _Findings(list(_faults(setting, host, question, answer)), [], clock)
    if ended.returncode == EXIT_LOST:
        for sign, mend in _REFUSALS.items():
            if sign in ended.stderr:
                return _Findings([f"{setting}.name={host.name!r}: {mend} ({words})"], [])
        return _Findings([], [f"{setting}.name={host.name!r}: cannot be reached by ssh: {words}"])
    if ended.returncode in _NO_PROGRAM:
        return _Findings([f"{setting}.python={host.python!r}: {host.name} has no interpreter {python} ({words})"], [])
    return _Findings(
        [
            f"{setting}.name={host.name!r}: asyncrl of this launch is not at {Path(host_probe.__file__).parents[2]} "
            f"there; install it at the same path as here ({words})"
        ],
        [],
    )


def _clock_note(host: HostConfig, asked_at: float, at: float, answered_at: float) -> tuple[str, ...]:
    """Return a sentence if the clock of `host` certainly differs by `CLOCK_S` or more.

    The host read its clock, `at`, between the moments `asked_at` and `answered_at` of this host's clock.
    """
    least_s = max(asked_at - at, at - answered_at)
    if least_s < CLOCK_S:
        return ()
    side = "behind" if at < asked_at else "ahead of"
    return (
        f"the clock of {host.name} is {least_s:.0f} s {side} this host's: times of its processes are wrong by that; "
        "synchronise the hosts, for example with chrony",
    )


def _faults(setting: str, host: HostConfig, question: Question, answer: HostFindings) -> Iterator[str]:
    if tuple(map(int, answer.version.split("."))) < _OLDEST_PYTHON:
        yield f"{setting}.python={host.python!r}: is Python {answer.version} on {host.name}; give 3.11 or newer"
    yield from _address_fault(setting, host, answer.address)
    if not answer.marker_seen:
        yield (
            f"system.shared_filesystem=true: {host.name} does not see the files of this host in "
            f"fileroot={question.fileroot}; put fileroot on a shared file system, or set system.shared_filesystem=false"
        )
    elif answer.working_folder:
        yield (
            f"system.shared_filesystem=true: {host.name} cannot enter {question.working_folder}, in which the "
            f"processes start ({answer.working_folder}); give the command in a shared folder, or set "
            "system.shared_filesystem=false"
        )
    if answer.fileroot:
        yield (
            f"{setting}.fileroot={host.fileroot!r}: {host.name} cannot write to {question.fileroot} "
            f"({answer.fileroot}); name a folder that it can"
        )


def _address_fault(setting: str, host: HostConfig, error: str) -> Iterator[str]:
    if error:
        yield (
            f"{setting}.address={host.address!r}: is not an address of {host.name or 'this host'} ({error}); give one "
            "that `ip addr` shows there"
        )
