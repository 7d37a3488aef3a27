"""Answers questions about this host: `python -I -S host_probe.py`, a line of JSON (`Question`) in, one (`HostFindings`)
out.

The launcher runs it over ssh before a run starts (`asyncrl.runtime.hosts.ssh_check`). It imports the standard library
only, and runs with interpreters that asyncrl does not support, so that their version can be reported.
"""

import json
import os
import socket
import sys
import time
from typing import NamedTuple


class Question(NamedTuple):
    """The launcher's assumptions about a host.

    Attributes:
        address: address that processes bind to.
        working_folder: folder that processes start in; empty: they make their own below `fileroot`.
        fileroot: folder for runs.
        marker: name of a file that the launcher has put into `fileroot`; empty: the hosts share no folder.
    """

    address: str
    working_folder: str
    fileroot: str
    marker: str


class HostFindings(NamedTuple):
    """Findings on a host; an empty string where nothing is wrong.

    Attributes:
        version: version of the interpreter.
        address: error on binding to the address.
        working_folder: error on entering the folder.
        marker_seen: True if the launcher's file is there, or none was asked for.
        fileroot: reason why no run folder can be made.
        at: the host's time, in seconds since 1970.
    """

    version: str
    address: str
    working_folder: str
    marker_seen: bool
    fileroot: str
    at: float


def bind_error(address: str) -> str:
    """Return the error of binding to `address` on this host; empty if a process can."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listening:
            listening.bind((address, 0))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def answer(question: Question) -> HostFindings:
    """Answer a question about this host."""
    return HostFindings(
        version=".".join(map(str, sys.version_info[:2])),
        address=bind_error(question.address),
        working_folder=_enter_error(question.working_folder) if question.working_folder else "",
        marker_seen=not question.marker or os.path.isfile(os.path.join(question.fileroot, question.marker)),
        fileroot="" if question.marker else _make_error(question.fileroot),
        at=time.time(),
    )


def _enter_error(folder: str) -> str:
    try:
        os.chdir(folder)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _make_error(folder: str) -> str:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(folder, os.W_OK | os.X_OK) else "Permission denied"


if __name__ == "__main__":
    print(json.dumps(answer(Question(**json.loads(sys.stdin.readline())))._asdict()))
