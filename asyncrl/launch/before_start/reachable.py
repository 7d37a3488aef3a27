"""Checks that the services a run needs are running: hosts, a Slurm allocation, a Ray cluster, adopted servers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.served_policies import check_served_policies
from asyncrl.runtime.hosts.ssh_check import check_hosts
from asyncrl.runtime.settings import RAY, SLURM, address_of

_CONNECT_LIMIT_S = 10.0
_SLURM_LIMIT_S = 60.0
_FIND_LIMIT_S = 60.0
_ALLOCATED = "SLURM_JOB_NODELIST"
_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


def check_reachable(config: ExperimentConfig) -> list[str]:
    """Check that the services named in the settings are running.

    Returns:
        Sentences for the user, about clocks that differ and tokenizers that cannot be compared.

    Raises:
        ConfigError: one is not; the message names the setting.
        TrialError: a host does not answer by ssh now.
    """
    notes = check_hosts(config)
    if faults := [*_slurm(config), *_ray(config), *_servers(config)]:
        raise ConfigError("\n".join(faults))
    return [*notes, *check_served_policies(config)]


def _slurm(config: ExperimentConfig) -> Iterator[str]:
    if config.system.launcher != SLURM:
        return
    if shutil.which("srun") is None:
        yield "system.launcher='slurm': there is no srun on PATH; start the run on a node of the Slurm cluster"
        return
    allocated = os.environ.get(_ALLOCATED)
    ask = (
        ["scontrol", "show", "hostnames", allocated] if allocated else ["sinfo", "--Node", "--noheader", "--format=%N"]
    )
    try:
        nodes = set(_printed(ask).split())
    except (OSError, subprocess.SubprocessError) as error:
        yield f"system.launcher='slurm': `{' '.join(ask)}` fails ({error}); start the run where Slurm answers"
        return
    for number, host in enumerate(config.system.hosts):
        if host.name and host.name not in nodes:
            of = f"in this allocation ({allocated})" if allocated else "of this cluster"
            yield (
                f"system.hosts[{number}].name={host.name!r}: no node {of}, which are "
                f"{', '.join(sorted(nodes)) or 'none'}; give one of them"
            )


def _printed(command: Sequence[str]) -> str:
    """Return the output of `command`.

    Raises:
        OSError: it failed; the message has the last line of its output.
    """
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_SLURM_LIMIT_S, check=False)
    if ended.returncode:
        raise OSError((ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1])
    return ended.stdout


def _ray(config: ExperimentConfig) -> Iterator[str]:
    """Check the address of a Ray cluster. For `auto` Ray itself finds the cluster later, in its own process."""
    if config.system.launcher != RAY:
        return
    host, separator, port = address_of(config.system.launcher_args).rpartition(":")
    if separator and port.isdecimal() and (why := _no_answer(host.strip("[]"), int(port))):
        yield (
            f"system.launcher_args={config.system.launcher_args}: no Ray cluster answers there ({why}); correct the "
            "address, or start one (`ray start --head`)"
        )


def _servers(config: ExperimentConfig) -> Iterator[str]:
    """Check the adopted servers, or the interpreter that starts servers on this host."""
    program, name = config.generation.engine.program, str(config.generation.backend)
    if program is None:
        return
    setting = f"generation.{name}"
    if program.python and not program.urls and not config.system.hosts:
        asked = [str(Path(program.python).expanduser()), "-c", _FIND, name]
        try:
            is_missing = subprocess.run(asked, timeout=_FIND_LIMIT_S, check=False).returncode != 0
        except (OSError, subprocess.TimeoutExpired) as error:
            yield f"{setting}.python={program.python!r}: the interpreter cannot be asked for {name}: {error}"
            is_missing = False
        if is_missing:
            yield (
                f"{setting}.python={program.python!r}: {name} is not installed for this interpreter; `asyncrl install "
                f"{name}_gpu` (without a GPU: {name}_cpu) makes an environment for it"
            )
    for url in program.urls:
        parts = urlsplit(url)
        if parts.hostname and parts.port and (why := _no_answer(parts.hostname, parts.port)):
            yield (
                f"{setting}.urls={url!r}: no server answers there ({why}); start it first, or leave urls out "
                "and the run starts its own"
            )


def _no_answer(host: str, port: int) -> str:
    """Return why nothing listens at `host`:`port`; empty if something does."""
    try:
        socket.create_connection((host, port), _CONNECT_LIMIT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
