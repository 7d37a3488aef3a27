"""Keep what a run's processes send to each other away from the proxy of the environment (`http_proxy`)."""

from __future__ import annotations

import os
import socket

from asyncrl.config.experiment import ExperimentConfig

VARIABLES = ("no_proxy", "NO_PROXY")
"""Both are read: curl, requests and httpx take the first, some programs the second alone."""
_THIS_HOST = ("localhost", "127.0.0.1", "::1")


def bypass_proxy(config: ExperimentConfig) -> None:
    """Add the run's hosts to `no_proxy` of this process and of all that it starts: agents' own HTTP clients, SGLang.

    Prompts and session keys would otherwise go to the proxy, which answers in place of the run. What the user named
    stays. Call it before the process starts others.
    """
    named = [entry.strip() for name in VARIABLES for entry in os.environ.get(name, "").split(",") if entry.strip()]
    if "*" in named:
        return
    hosts = [address for host in config.system.hosts for address in (host.address, host.name)]
    own = [*_THIS_HOST, config.system.host, socket.gethostname(), *hosts]
    value = ",".join(dict.fromkeys([*named, *filter(None, own)]))
    os.environ.update(dict.fromkeys(VARIABLES, value))
