"""Processes on other hosts by `ssh`, as its own configuration says (aliases, users, ports, keys, jump hosts).

A login must not need a typed password (`BatchMode`). A host that refuses is tried for 20 s, because its server may be
starting. `ssh` only starts the host's agent: if it ends or is cut, the agent and its processes go on.

Before a run, each host is logged in to once, all at the same time, and its agent is asked what is missing there. An
error that a retry cannot fix is reported as a wrong setting: unknown name, refused login, unknown host key, no
interpreter or no asyncrl there, an address of another host, a folder that is not shared. A host that does not answer is
reported too, as a failure that may pass.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

import asyncrl
from asyncrl.comm.typed import decode_json
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.hosts.agent_backend import AgentBackend, agent_command
from asyncrl.hosts.link import OLD_PYTHON, Findings, Question
from asyncrl.runtime.process.hardware import bind_error
from asyncrl.runtime.settings import EXIT_LOST, HostConfig
from asyncrl.runtime.trials.claim import TrialError

_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "20",
    "ConnectionAttempts": "20",  # a second apart
    "ServerAliveInterval": "15",
    "ServerAliveCountMax": "4",
}
_LIMIT_S = 90.0
"""For the answer of a host: ssh tries for 20 s, and a login may start slowly."""
_AT_ONCE = 32
"""Logins at the same time."""
_NO_PROGRAM = (126, 127)
"""Exit codes of a shell that cannot run a command."""
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


def ssh_command(arguments: Sequence[str], host: str, command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` on `host`.

    `ssh` gets no terminal, which would echo its input; the shell at the other end gets one quoted line.
    """
    options = [part for name, value in _OPTIONS.items() for part in ("-o", f"{name}={value}")]
    return ["ssh", "-T", *options, *arguments, "--", host, shlex.join(command)]


class Backend(AgentBackend):
    """Starts processes on other hosts by `ssh`."""

    def carrier(self, host: HostConfig, command: list[str]) -> list[str]:
        """See the base class."""
        return ssh_command(self.arguments, host.name, command)

    @staticmethod
    def check_hosts(config: ExperimentConfig) -> list[str]:
        """See the base class: the sentences are about hosts whose clock differs from this one's."""
        fileroot = Path(config.fileroot).expanduser().resolve()
        fileroot.mkdir(parents=True, exist_ok=True)
        marker = fileroot / f".asyncrl-{secrets.token_hex(8)}"
        marker.touch(mode=0o600)
        try:
            with ThreadPoolExecutor(_AT_ONCE) as logins:
                asked = [
                    logins.submit(_check, config, fileroot, marker.name, number, host)
                    for number, host in enumerate(config.system.hosts)
                ]
        finally:
            marker.unlink(missing_ok=True)
        notes, refused, silent = list[str](), list[str](), list[str]()
        for login in asked:
            try:
                notes += login.result()
            except ConfigError as error:
                refused.append(str(error))
            except TrialError as error:
                silent.append(str(error))
        if refused:
            raise ConfigError("\n".join(refused + silent))
        if silent:
            raise TrialError("\n".join(silent))
        return notes


def _check(config: ExperimentConfig, fileroot: Path, marker: str, number: int, host: HostConfig) -> list[str]:
    """Log in to a host, and ask its agent what is missing there; `marker` is a file in `fileroot`.

    Returns:
        A sentence if its clock differs from this one's.
    """
    setting = f"system.hosts[{number}]"
    if not host.name:
        if error := bind_error(host.address):
            raise ConfigError(_address_fault(setting, host, error))
        return []
    shared = config.system.shared_filesystem
    question = Question(
        host.address, os.getcwd() if shared else "", host.fileroot or str(fileroot), marker if shared else ""
    )
    command = ssh_command(config.system.launcher_args, host.name, agent_command(host.python))
    asked_at = time.time()
    try:
        ended = subprocess.run(
            command, input=msgspec.json.encode(question) + b"\n", capture_output=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise TrialError(
            f"{setting}.name={host.name!r}: no answer by ssh within {_LIMIT_S:g} s; is the host up?"
        ) from None
    answered_at, errors = time.time(), ended.stderr.decode(errors="replace")
    words = (errors.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    if ended.returncode == EXIT_LOST:
        for sign, mend in _REFUSALS.items():
            if sign in errors:
                raise ConfigError(f"{setting}.name={host.name!r}: {mend} ({words})")
        raise TrialError(f"{setting}.name={host.name!r}: cannot be reached by ssh: {words}")
    if ended.returncode in _NO_PROGRAM:
        python = host.python or sys.executable
        raise ConfigError(f"{setting}.python={host.python!r}: {host.name} has no interpreter {python} ({words})")
    if ended.returncode == OLD_PYTHON:
        raise ConfigError(f"{setting}.python={host.python!r}: is Python {words} on {host.name}; give 3.11 or newer")
    if ended.returncode:
        raise ConfigError(
            f"{setting}.name={host.name!r}: asyncrl of this launch is not at {Path(asyncrl.__file__).parent} there; "
            f"install it at the same path as here ({words})"
        )
    try:
        found = decode_json(ended.stdout.splitlines()[-1], Findings)  # a login may print lines before
    except (IndexError, msgspec.DecodeError):
        raise ConfigError(
            f"{setting}.name={host.name!r}: the login succeeded, and ran another command than the given one; "
            f"remove `command=` for this key from authorized_keys, or ForceCommand from sshd_config ({words})"
        ) from None
    if faults := list(_faults(setting, host, question, found)):
        raise ConfigError("\n".join(faults))
    return _clock_note(host, asked_at, found, answered_at)


def _clock_note(host: HostConfig, asked_at: float, found: Findings, answered_at: float) -> list[str]:
    """Return a sentence if the clock of `host` certainly differs by `CLOCK_S` or more.

    It read its clock, twice, between the moments `asked_at` and `answered_at` of this host's clock.
    """
    behind_s, ahead_s = asked_at - found.began, found.at - answered_at
    least_s = max(behind_s, ahead_s)
    if least_s < CLOCK_S:
        return []
    side = "behind" if behind_s > ahead_s else "ahead of"
    return [
        f"the clock of {host.name} is {least_s:.0f} s {side} this host's: times of its processes are wrong by that; "
        "synchronise the hosts, for example with chrony"
    ]


def _faults(setting: str, host: HostConfig, question: Question, found: Findings) -> Iterator[str]:
    if found.address:
        yield _address_fault(setting, host, found.address)
    if not found.marker_seen:
        yield (
            f"system.shared_filesystem=true: {host.name} does not see the files of this host in "
            f"fileroot={question.fileroot}; put fileroot on a shared file system, or set system.shared_filesystem=false"
        )
    elif found.working_folder:
        yield (
            f"system.shared_filesystem=true: {host.name} cannot enter {question.working_folder}, in which the "
            f"processes start ({found.working_folder}); give the command in a shared folder, or set "
            "system.shared_filesystem=false"
        )
    if found.fileroot:
        yield (
            f"{setting}.fileroot={host.fileroot!r}: {host.name} cannot write to {question.fileroot} "
            f"({found.fileroot}); name a folder that it can"
        )


def _address_fault(setting: str, host: HostConfig, error: str) -> str:
    return (
        f"{setting}.address={host.address!r}: is not an address of {host.name or 'this host'} ({error}); give one that "
        "`ip addr` shows there"
    )
