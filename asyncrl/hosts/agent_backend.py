"""Processes on other hosts, which one agent on each host starts, watches and logs (`asyncrl.hosts.agent`).

A back end (`asyncrl.runtime.backends`) only says how an agent is started on a host: by a command here (`ssh host`,
`srun -w node`) that carries the agent's `Order` to its standard input, or not at all, as in a pod. Everything else is
here. Agents call the launcher over the run's TLS and with its token; `asyncrl.hosts.link` has what is said. So the
other hosts must be able to reach the launcher's address. No command line has the order, or the environment with the
user's keys. Output comes back into the run's folder. If a host does not see that folder
(`system.shared_filesystem=false`), settings and secret are sent along, into a folder on the host's disk.

A connection that is cut costs nothing: the agent opens it again, and its processes go on. An agent is lost if it is
silent for `GONE_S`, if it leaves, if what carried it here ends, or if another one dials for its host. Then its
processes count as dead (`EXIT_LOST`), with the reason in their logs, and the next start on that host starts another
agent. What carried it may have ended alone: `ssh` exits with 255 if its own connection is cut. An agent that is
heard again within `BACK_S` goes on then.
The lost agent is told to end if it dials again; otherwise it ends its processes after `PAUSE_S`. Until then they are
kept apart from their successors by their slot (`asyncrl.hosts.agent`) and by their incarnation
(`asyncrl.runtime.process.worker`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import socket
import sys
from abc import abstractmethod
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, ClassVar

import msgspec
from aiohttp import web

import asyncrl
from asyncrl.comm.http_server import Body, HttpRoute, HttpServer, Refused, json_response
from asyncrl.comm.security import RunSecret
from asyncrl.comm.typed import decode_json
from asyncrl.comm.waits import CALL_S
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import CONFIG_FILE, LOGS_DIR, SECRET_FILE, read_run_config, read_settings
from asyncrl.config.values import to_yaml
from asyncrl.hosts.agent import SLOT_VARIABLE
from asyncrl.hosts.link import (
    BACK_S,
    GONE_S,
    LONGEST_MESSAGE,
    OLD_PYTHON,
    Call,
    End,
    Ended,
    Kill,
    Left,
    Link,
    Message,
    Order,
    Output,
    Start,
    Stop,
)
from asyncrl.runtime.backends import LauncherBackend, WorkerHandle, backend_class, last_lines
from asyncrl.runtime.plan import HOST_VARIABLE, WorkerPlan, plan_workers
from asyncrl.runtime.settings import EXIT_FAILED, EXIT_LOST, HostConfig
from asyncrl.runtime.trials.claim import TrialError

OLDEST_PYTHON = (3, 11)
CANNOT_START = 101
"""Exit code of a command that found that no agent can be started, now or later."""
_SHOWN_LINES = 5
_OF_THE_LOGIN = frozenset(
    {
        *("_", "DISPLAY", "DBUS_SESSION_BUS_ADDRESS", "HOME", "HOSTNAME", "LOGNAME", "LS_COLORS", "MAIL", "OLDPWD"),
        *("PATH", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "USER"),
        # of an installation there, as PATH is: libraries and interpreters of this host may not exist, or not fit
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "_CE_CONDA", "_CE_M"),
        *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", HOST_VARIABLE),
    }
)
_OF_THE_LOGIN_PREFIXES = ("SLURM", "SSH_", "XDG_", "TMUX", "SRUN_", "PMI", "CONDA_")
_log = logging.getLogger(__name__)


def agent_command(python: str) -> list[str]:
    """Return the command line of an agent, which finds the asyncrl of this launch at the same path as here."""
    root = str(Path(asyncrl.__file__).parents[1])
    program = (
        "import sys, time; began, v = time.time(), sys.version_info; "
        f"v < {OLDEST_PYTHON} and (sys.stderr.write('%d.%d' % v[:2]), sys.exit({OLD_PYTHON})); "
        f"sys.path = [p for p in sys.path if p]; {root!r} in sys.path or sys.path.insert(0, {root!r}); "
        "from asyncrl.hosts.agent import main; main(began)"
    )
    return [python or sys.executable, "-c", program]


class AgentBackend(LauncherBackend):
    """Starts processes on their hosts. Those of the launcher's host are started by the local back end."""

    deals_gpus: ClassVar[bool] = False
    """True if the cluster decides which GPUs an agent, and so a process, sees."""
    detaches: ClassVar[bool] = False
    """True if agents leave the process that starts them (`Order.detached`)."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.config = read_run_config(run_dir)
        self.arguments = self.config.system.launcher_args
        """Arguments that the user adds to the command."""
        self._local = backend_class("local")(run_dir)
        self._agents: dict[str, _Agent] = {}
        self._given_up: set[tuple[str, int]] = set()
        self._server: HttpServer | None = None
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts = itertools.count(self.launch_number << 32)

    @abstractmethod
    def carrier(self, host: HostConfig, command: list[str]) -> list[str]:
        """Return the command line here that runs `command` on `host` and carries its standard input and output; empty
        if an agent starts there by itself. That one has `system.start_timeout_s` to dial, as one that detaches has.
        """

    async def start_agent(self, host: HostConfig, order: bytes, log: BinaryIO) -> asyncio.subprocess.Process | None:
        """Start the agent of `host`, with `order` as a line of its standard input.

        Returns:
            The process here that carries it; None if there is none.
        """
        command = self.carrier(host, agent_command(host.python))
        if not command:
            return None
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
        assert process.stdin is not None, "a pipe"
        process.stdin.write(order)
        process.stdin.close()
        return process

    def agent_log(self, host: HostConfig) -> Path:
        """Return the file that takes the output of `host`'s agent and its carrier."""
        return self.run_dir / LOGS_DIR / f"host_{host.name.replace('/', '_')}.log"

    def cores(self, host: HostConfig) -> int:
        """Return the number of cores that the processes of `host` use."""
        plans = plan_workers(self.config)
        return host.cpus or sum(plan.resources.threads for plan in plans if plan.host.name == host.name)

    async def start(self, plan: WorkerPlan) -> WorkerHandle:
        """Start the process on `plan.host`."""
        if not plan.host.name:
            self._local.lock = self.lock
            return await self._local.start(plan)
        number = next(self._starts)
        start = self.order_of(plan, number)
        if (length := len(msgspec.json.encode(start))) > LONGEST_MESSAGE:
            raise TrialError(
                f"{plan.name}: settings and environment have {length} bytes, and another host takes at most "
                f"{LONGEST_MESSAGE}; unset large environment variables"
            )
        log = await self.open_log(plan)
        try:
            agent = await self._agent_of(plan)
        except BaseException:
            log.close()
            raise
        worker = agent.workers[number] = _RemoteWorker(plan, agent.link, number, log)
        agent.link.send(start)
        return worker

    def order_of(self, plan: WorkerPlan, number: int) -> Start:
        """Return the message that starts the process."""
        environment = carried_environment(plan) | self.mark | {SLOT_VARIABLE: f"{number} {plan.name} {self.run_dir}"}
        gpus = None
        if self.deals_gpus and plan.resources.gpus:
            gpus = [plan.host.gpus.index(gpu) for gpu in plan.resources.gpus]
            del environment["CUDA_VISIBLE_DEVICES"]
        folder, files = os.getcwd(), dict[str, str]()
        if not self.config.system.shared_filesystem:
            folder = plan.run_dir or str(self.run_dir)
            settings = read_settings(self.run_dir) | {"fileroot": str(Path(folder).parents[1])}
            files = {CONFIG_FILE: to_yaml(settings)}
            if self.config.system.encrypt:
                files[SECRET_FILE] = (self.run_dir / SECRET_FILE).read_text()
        entries = [os.fsencode(f"{name}={value}") for name, value in environment.items()]
        return Start(number, plan.command(self.run_dir), entries, folder, files, gpus)

    async def _agent_of(self, plan: WorkerPlan) -> _Agent:
        """Return the agent of the plan's host; start it if there is none."""
        async with self._opening:
            if self._server is None:
                await self.listen()
            if (agent := self._agents.get(plan.host.name)) is not None:
                return agent
            host = plan.host
            agent = _Agent(host.name, next(self._starts), self.agent_log(host))
            proofs = (self._secret.token, self._secret.certificate)
            order = Order(self.url, agent.host, agent.incarnation, *proofs, detached=self.detaches)
            agent.log.parent.mkdir(parents=True, exist_ok=True)
            with agent.log.open("ab") as log:
                agent.carrier = await self.start_agent(host, msgspec.json.encode(order) + b"\n", log)
            self._agents[host.name] = agent
            task = asyncio.create_task(self._watch(agent))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return agent

    async def listen(self) -> None:
        """Listen for agents."""
        self._secret = RunSecret.load(self.run_dir / SECRET_FILE).http()
        routes = {"/agent": HttpRoute(self._answer, "POST", 2 * LONGEST_MESSAGE)}
        self._server = HttpServer(routes, token=self._secret.token, tls=self._secret.server_context())
        self.url = await self._server.start(_own_address(self.config))
        """URL at which agents dial."""

    async def _answer(self, _: web.BaseRequest, body: Body) -> web.Response:
        """Answer a call of an agent, which has shown the run's token."""
        try:
            call = decode_json(body, Call)
        except msgspec.DecodeError as error:
            raise Refused(400, {"error": str(error)}, "malformed") from error
        agent = self._agents.get(call.host)
        if (call.host, call.incarnation) in self._given_up:
            raise Refused(HTTPStatus.GONE, {"error": "this agent was given up"}, "given_up")
        if agent is None or not self._is_expected(agent, call.incarnation):
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "no agent is expected there now"}, "unexpected")
        for message in agent.link.take(call.parcel):
            self._handle(agent, message)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(call.wait_s):
                await agent.link.waiting()
        return json_response(agent.link.parcel())

    def _is_expected(self, agent: _Agent, incarnation: int) -> bool:
        """True if the agent that dials is the one that was started. A pod's program starts by itself: the first one is
        expected, and a later one shows that the first has ended.
        """
        if agent.carrier is None and not agent.link.was_heard:
            agent.incarnation = incarnation
        elif agent.carrier is None and agent.incarnation != incarnation:
            self._lose(agent, "the program there was started again")
        return agent.incarnation == incarnation

    def _handle(self, agent: _Agent, message: Message) -> None:
        if isinstance(message, Left):
            self._lose(agent, message.why)
        elif isinstance(message, Output | Ended) and (worker := agent.workers.get(message.process)) is not None:
            if isinstance(message, Output):
                worker.print(message.text)
            else:
                del agent.workers[message.process]
                worker.end(message.code)

    async def _watch(self, agent: _Agent) -> None:
        """Give the agent up once it is silent, or what carried it has ended."""
        alone = agent.carrier is not None and not self.detaches  # its end tells that no agent will dial
        first_s = math.inf if alone else self.config.system.start_timeout_s
        silent = asyncio.create_task(agent.link.silent(first_s, GONE_S))
        waits = {silent} if agent.carrier is None else {silent, asyncio.create_task(_carrier_end(agent))}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        if silent.done() and not silent.cancelled():
            self._lose(agent, f"its agent was silent for {GONE_S if agent.link.was_heard else first_s:g} s")
        elif agent.carrier is not None:
            code = agent.carrier.returncode
            why = f"what carried its agent has ended with {code}"
            self._lose(agent, why, EXIT_FAILED if code == CANNOT_START else EXIT_LOST)

    def _lose(self, agent: _Agent, why: str, code: int = EXIT_LOST) -> None:
        """Forget the agent; its processes count as dead."""
        if self._agents.get(agent.host) is not agent:
            return
        del self._agents[agent.host]
        self._given_up.add((agent.host, agent.incarnation))
        agent.gone.set()
        words = "" if agent.link.was_heard else "".join(f"{line}\n" for line in last_lines(agent.log, _SHOWN_LINES))
        for worker in agent.workers.values():
            worker.print(f"{words}lost with host {agent.host}: {why}\n".encode())
            worker.end(code)
        agent.workers.clear()
        agent.link.send(End())

    async def close(self) -> None:
        """See the base class."""
        agents = list(self._agents.values())
        for agent in agents:
            agent.link.send(End())
            if agent.carrier is not None and agent.carrier.returncode is None and not agent.link.was_heard:
                agent.carrier.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CALL_S):
                for agent in agents:
                    await agent.ended()
        for agent in agents:
            if agent.carrier is not None and agent.carrier.returncode is None:
                agent.carrier.kill()
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            await self._server.close()
        await self._local.close()


class _Agent:
    """The launcher's side of one agent."""

    def __init__(self, host: str, incarnation: int, log: Path) -> None:
        self.host, self.incarnation, self.log = host, incarnation, log
        self.link = Link()
        self.workers: dict[int, _RemoteWorker] = {}
        self.carrier: asyncio.subprocess.Process | None = None
        self.gone = asyncio.Event()

    async def ended(self) -> None:
        """Wait until it has left or is lost, and its command here has ended."""
        if self.link.was_heard:
            await self.gone.wait()
        if self.carrier is not None:
            await self.carrier.wait()


async def _carrier_end(agent: _Agent) -> None:
    """Wait until what carries the agent has ended, and the agent with it."""
    assert agent.carrier is not None
    code = await agent.carrier.wait()
    if agent.link.was_heard and (code < 0 or code == EXIT_LOST):  # this end was killed or cut; the other may go on
        await agent.link.silent(BACK_S, BACK_S)


class _RemoteWorker(WorkerHandle):
    def __init__(self, plan: WorkerPlan, link: Link, number: int, log: BinaryIO) -> None:
        super().__init__(plan, f"on {plan.host.name}", Path(log.name))
        self._link, self._number, self._log = link, number, log
        self._code: int | None = None
        self._ended = asyncio.Event()

    @property
    def exit_code(self) -> int | None:
        return self._code

    async def wait(self) -> None:
        await self._ended.wait()

    def terminate(self) -> None:
        if self._code is None:
            self._link.send(Stop(self._number))

    def kill(self) -> None:
        if self._code is None:
            self._link.send(Kill(self._number))

    def print(self, text: bytes) -> None:
        """Add what the process printed to its log. As with a process here, it is missing there if the disk is full."""
        try:
            self._log.write(text)
            self._log.flush()
        except OSError as error:
            _log.warning("%s: %d bytes of output are lost: %s", self.log, len(text), error)

    def end(self, code: int) -> None:
        """Let the process count as ended."""
        self._code = code
        self._log.close()
        self._ended.set()


def carried_environment(plan: WorkerPlan) -> dict[str, str]:
    """Return the launcher's environment for a process on another host, without variables of the login here."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_THE_LOGIN and not name.startswith(_OF_THE_LOGIN_PREFIXES)
    }
    return own | plan.environment()


def _own_address(config: ExperimentConfig) -> str:
    """Return the address of this host at which the agents reach the launcher."""
    for host in config.system.hosts:
        if not host.name:
            return host.address or os.environ[HOST_VARIABLE]
    # The launcher's host runs nothing: its address is that of the way to the others. Nothing is sent.
    far = next((host.address for host in config.system.hosts if host.address), "192.0.2.1")
    kind = socket.AF_INET6 if ":" in far else socket.AF_INET
    with socket.socket(kind, socket.SOCK_DGRAM) as way:
        way.connect((far, 9))
        return str(way.getsockname()[0])
