"""Represent one process in a pod: pass standard input to the pod's agent, and write the output that comes back.

    python -I -S pod_carrier.py RUN_DIR HOST LIMIT_S PYTHON

The first line of standard input is the supervisor's order. This program exits with the code that the agent
(`asyncrl.runtime.hosts.pod_agent`) reports. It exits with 255 only if the process is lost: no agent responds within
LIMIT_S, the agent that started it is silent for `GONE_S`, or the agent has another incarnation. A broken connection is
opened again and continues where it ended; it never counts as an exit. Run this file by path: it imports the standard
library only, so that a thousand of these processes stay small.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import os
import secrets
import select
import ssl
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

GONE_S = 20.0
"""Seconds without an answer after which an agent counts as gone; it answers every request within `_WAIT_S`."""
_WAIT_S = 3.0
_ANSWER_LIMIT_S = 8.0
_AGAIN_S = 0.5
_LOST = 255  # asyncrl.runtime.exit_codes.EXIT_LOST; nothing of asyncrl can be imported here
_SECRET_FILE = "secret"  # asyncrl.config.run_dir.SECRET_FILE
_UNREACHED = (OSError, http.client.HTTPException, ValueError, KeyError)


class Gone(Exception):
    """The process is lost; the message says why."""


def agent_file(run_dir: Path, host: str) -> Path:
    """Return the file in which the agent of `host` writes its URL and incarnation."""
    return run_dir / "agents" / f"{host}.json"


class _Agent:
    def __init__(self, run_dir: Path, host: str) -> None:
        self._run_dir, self._file = run_dir, agent_file(run_dir, host)
        self.name = secrets.token_hex(8)
        self.incarnation: int | None = None
        """Incarnation of the agent that started the process; None before the start."""

    def call(self, path: str, **body: Any) -> Any:
        """Call the agent, which authenticates itself with the run's certificate.

        Raises:
            Gone: the agent does not know the process.
            OSError, HTTPException, ValueError, KeyError: it cannot be reached now, or its answer is malformed.
        """
        there = json.loads(self._file.read_text())
        if self.incarnation is not None and there["incarnation"] != self.incarnation:
            raise Gone("the pod's program was started again")
        value, _, pem = (self._run_dir / _SECRET_FILE).read_text().partition("\n")
        token = hmac.new(bytes.fromhex(value), b"asyncrl/http-bearer", hashlib.sha256).hexdigest()  # comm.security
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname = False
        tls.load_verify_locations(cadata=pem[pem.find("-----BEGIN CERTIFICATE-----") :])
        place = urlsplit(there["url"])
        connection = http.client.HTTPSConnection(str(place.hostname), place.port, timeout=_ANSWER_LIMIT_S, context=tls)
        try:
            content = json.dumps({"name": self.name} | body)
            connection.request("POST", path, content, {"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            told = answer.read()
        finally:
            connection.close()
        if answer.status == http.HTTPStatus.GONE:
            raise Gone("the pod's program knows nothing of it")
        if answer.status != http.HTTPStatus.OK:
            raise ValueError(f"{path} was answered with {answer.status}: {told[:500]!r}")
        if path == "/start":
            self.incarnation = there["incarnation"]
        return json.loads(told)


def main(run_dir: Path, host: str, limit_s: float, python: str) -> int:
    """Carry one process of the pod's agent until it ends; return its exit code."""
    order = bytearray()
    while not order.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return _LOST
        order += byte
    agent, deadline = _Agent(run_dir, host), time.monotonic() + limit_s
    while agent.incarnation is None:
        try:
            agent.call("/start", python=python, order=order.decode().rstrip("\n"))
        except _UNREACHED as error:
            if time.monotonic() > deadline:
                print(f"no pod of host {host} has answered within {limit_s:g} s: {error}", flush=True)
                return _LOST
            select.select([0], [], [], _AGAIN_S)
            if _ended(0):
                return _LOST
    threading.Thread(target=_pass_on, args=(agent,), daemon=True).start()
    try:
        return _output(agent)
    except Gone as gone:
        print(f"lost with the pod of host {host}: {gone}", flush=True)
        return _LOST


def _ended(descriptor: int) -> bool:
    """True if the writing end of the pipe is closed. Unread data stays in the pipe."""
    looked = select.poll()
    looked.register(descriptor, select.POLLHUP)
    return bool(looked.poll(0))


def _pass_on(agent: _Agent) -> None:
    """Pass standard input on until it ends; repeat each piece until it is acknowledged."""
    offset, text = 0, b"."
    while text:
        text = os.read(0, 1 << 12)
        while True:
            try:
                agent.call("/tell", offset=offset, text=text.decode(), end=not text)
                break
            except Gone:
                return
            except _UNREACHED:
                time.sleep(_AGAIN_S)
        offset += len(text)


def _output(agent: _Agent) -> int:
    """Write the output as it arrives; return the exit code.

    Raises:
        Gone: the process is lost.
    """
    offset, answered = 0, time.monotonic()
    while True:
        try:
            told = agent.call("/ask", offset=offset, wait_s=_WAIT_S)
        except _UNREACHED as error:
            if time.monotonic() - answered > GONE_S:
                raise Gone(f"no answer for {GONE_S:g} s ({error})") from error
            time.sleep(_AGAIN_S)
            continue
        answered = time.monotonic()
        left = output = base64.b64decode(told["output"])
        while left:
            left = left[os.write(1, left) :]
        offset += len(output)
        if told["exit_code"] is not None:
            return int(told["exit_code"])


if __name__ == "__main__":
    folder, name, longest, interpreter = sys.argv[1:]
    os._exit(main(Path(folder), name, float(longest), interpreter))
