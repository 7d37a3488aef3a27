"""The program that the launcher has on each other host: it starts, watches and ends the processes there.

    python -m asyncrl.hosts.agent                 by ssh, srun or Ray; the `Order` is a line on standard input,
                                                  or before a run, by ssh, a `Question` about the host
    python -m asyncrl.hosts.agent RUN_DIR HOST    the program of a pod, which finds the launcher by the files

It dials the launcher (`asyncrl.hosts.agent_backend`) over TLS. The launcher proves itself with the run's certificate
and this program with the run's token. It runs every process below a supervisor (`asyncrl.runtime.supervisor`), as the
launcher does on its own host, with the environment that the launcher sends, and sends back what the process prints and
its exit code.

A connection that is cut is opened again, and the processes go on. They end if the launcher is silent for `PAUSE_S`,
if nothing listens at its address any more, if it says so, or with this program, however it ends: it holds the standard
input of their supervisors.

Replaced processes. A host that was cut off may still run a process that the launcher has replaced: until the silence is
over, or longer if everything there was stopped. So before a process is started, earlier ones of the same slot are
killed. They are found by their environment (`SLOT_VARIABLE`). A start that arrives after a later one is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn

import aiohttp
import msgspec

from asyncrl.comm.http_client import HttpError, HttpRefused, JsonHttp
from asyncrl.comm.security import HttpSecurity, RunSecret, SecretError
from asyncrl.comm.typed import json_decoder
from asyncrl.comm.waits import ANSWER_S, CALL_S, HOLD_S, LOOK_S, PAUSE_S, STOP_S
from asyncrl.config.run_dir import AGENTS_FILE, SECRET_FILE
from asyncrl.hosts.link import (
    Call,
    End,
    Ended,
    Findings,
    Kill,
    Left,
    Link,
    Message,
    Order,
    Output,
    Parcel,
    Question,
    Start,
    Stop,
)
from asyncrl.runtime.process.hardware import bind_error
from asyncrl.runtime.settings import EXIT_FAILED, EXIT_LOST
from asyncrl.runtime.supervisor import (
    GONE_LIMIT_S,
    STOP_SIGNAL,
    Identity,
    adopt_orphans,
    end_all,
    end_marked,
    kill_descendants,
    supervised,
    with_variable,
)

SLOT_VARIABLE = "ASYNCRL_SLOT"
"""Environment variable of a process on another host: a number that grows from start to start, a space, and the slot:
the name of the process and the folder of its run."""
_CHUNK = 1 << 16


class Refused(Exception):
    """A process cannot be started; the message says why."""


class Agent:
    """The processes of one agent, and its link to the launcher that `order` names."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._link = Link()
        self._commands: dict[int, asyncio.Queue[Stop | Kill]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ends = False

    def end(self, why: str) -> None:
        """End the processes, and return from `serve`."""
        if not self._over.done():
            self._over.set_result(why)

    async def serve(self, read: Callable[[], Order | None] | None = None) -> str:
        """Serve the launcher until it is gone or `end` is called; then end all processes. Return why.

        Args:
            read: returns the order as it is now; another one ends this agent.
        """
        http = JsonHttp(HttpSecurity(self._order.token, Path(), self._order.certificate))
        exchanges = (self._exchange(http, 0.0, read), self._exchange(http, HOLD_S, read), self._await_silence())
        tasks = [asyncio.create_task(exchange) for exchange in exchanges]
        for task in tasks:
            task.add_done_callback(lambda done: None if done.cancelled() else self.end(done.result()))
        why = await self._over
        tasks[1].cancel()
        self._ends = True
        self._link.hold_all()
        for number, commands in self._commands.items():  # the supervisors end them
            commands.put_nowait(Kill(number))
        if self._running:
            await asyncio.wait(self._running, timeout=GONE_LIMIT_S + ANSWER_S)
        kill_descendants(os.getpid(), wait_s=STOP_S)
        self._link.send(Left(why))
        delivery = asyncio.create_task(self._link.delivered())
        await asyncio.wait({tasks[0], delivery}, timeout=STOP_S, return_when=asyncio.FIRST_COMPLETED)
        delivery.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, delivery, return_exceptions=True)
        await http.close()
        return why

    async def _await_silence(self) -> str:
        await self._link.silent(PAUSE_S, PAUSE_S)
        return f"the launcher was silent for {PAUSE_S:g} s"

    async def _exchange(self, http: JsonHttp, wait_s: float, read: Callable[[], Order | None] | None) -> str:
        """Ask what to do, or with `wait_s=0` tell what happens, again and again. Return why the launcher is gone."""
        order, last_printed = self._order, ""
        while read is None or read() == order:
            if not wait_s:
                await self._link.waiting()
            call = Call(order.host, order.incarnation, wait_s, self._link.parcel())
            try:
                answer = await http.call("POST", f"{order.url}/agent", call, timeout_s=wait_s + CALL_S, reply=Parcel)
            except HttpError as error:
                if why := _end_of_launcher(error):
                    return why
                if str(error) != last_printed:
                    last_printed = str(error)
                    _say(last_printed)
                await asyncio.sleep(LOOK_S)
                continue
            for message in self._link.take(answer):
                self._handle(message)
        return "another launch of the run has begun"

    def _handle(self, message: Message) -> None:
        if isinstance(message, Start) and not self._ends:
            self._commands[message.process] = asyncio.Queue()
            task = asyncio.create_task(self._run(message))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        elif isinstance(message, Stop | Kill):
            if message.process in self._commands:
                self._commands[message.process].put_nowait(message)
        elif isinstance(message, End):
            self.end("the launcher has ended it")

    async def _run(self, start: Start) -> None:
        """Run one process to its end."""

        loop = asyncio.get_running_loop()

        def tell(text: str) -> None:
            loop.call_soon_threadsafe(self._link.send, Output(start.process, f"{text}\n".encode()))

        try:
            environment = _environment(start)
            mark = environment.get(SLOT_VARIABLE, "")
            await asyncio.to_thread(_take_slot, mark, start, tell)
            printed, output = os.pipe()
            try:
                process = await asyncio.create_subprocess_exec(
                    *supervised(start.command),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    cwd=start.folder,
                )
            finally:
                os.close(output)
        except (Refused, OSError) as error:
            tell(str(error))
            loop.call_soon(self._link.send, Ended(start.process, EXIT_LOST))
            del self._commands[start.process]
            return
        printing = asyncio.create_task(self._send_output(start.process, printed))
        obeying = asyncio.create_task(self._obey(process, self._commands[start.process]))
        code = await process.wait()
        if code == -signal.SIGKILL and mark:  # a killed supervisor leaves orphans, which could print for ever
            await asyncio.to_thread(end_marked, mark, SLOT_VARIABLE)
        await printing
        obeying.cancel()
        del self._commands[start.process]
        if not self._ends:
            self._link.send(Ended(start.process, code))

    async def _send_output(self, process: int, printed: int) -> None:
        reader = asyncio.StreamReader(_CHUNK)
        file = os.fdopen(printed, "rb", 0)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
        while piece := await reader.read(_CHUNK):
            self._link.send(Output(process, piece))
            await self._link.wait_for_space()

    async def _obey(self, process: asyncio.subprocess.Process, commands: asyncio.Queue[Stop | Kill]) -> None:
        while True:
            command = await commands.get()
            if isinstance(command, Stop):
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(STOP_SIGNAL)
            elif process.stdin is not None:
                process.stdin.close()


def _end_of_launcher(error: HttpError) -> str:
    """Return why the launcher is gone, or does not want this agent any more; empty if neither is certain."""
    cause = error.__cause__
    if isinstance(error, HttpRefused) and error.status == HTTPStatus.GONE:
        return "the launcher had given it up"
    if isinstance(cause, aiohttp.ClientConnectorCertificateError):
        return f"another program listens at the launcher's address: {error}"
    if isinstance(cause, aiohttp.ClientConnectorError) and isinstance(cause.os_error, ConnectionRefusedError):
        return f"nothing listens at the launcher's address any more: {error}"
    return ""


def _environment(start: Start) -> dict[str, str]:
    """Return the environment of a process: that of this agent and what the launcher sent."""
    sent = (os.fsdecode(entry).partition("=") for entry in start.environment)
    environment = dict(os.environ) | {name: value for name, _, value in sent}
    if start.gpus is not None:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        given = list(map(str, range(max(start.gpus) + 1))) if shown is None else shown.split(",")
        if len(given) <= max(start.gpus):
            raise Refused(f"the cluster gave this host the GPUs {given}, and the process needs numbers {start.gpus}")
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(given[gpu] for gpu in start.gpus)
    return environment


def _take_slot(mark: str, start: Start, tell: Callable[[str], None]) -> None:
    """Kill the processes on this host that were started earlier in the slot that `mark` names, and write the files."""
    number, _, slot = mark.partition(" ")

    def earlier() -> list[Identity]:
        found = [(process, *value.partition(" ")) for process, value in with_variable(SLOT_VARIABLE)]
        there = {process: int(its) for process, its, _, theirs in found if theirs == slot}
        if any(its > int(number) for its in there.values()):
            raise Refused(f"a later process has its slot by now: {slot}")
        return list(there)

    def killing(process: Identity) -> None:
        tell(f"pid {process.pid} was given up, and still ran: killed")

    if slot and (left := end_all(earlier, killing)[1]):
        raise Refused(f"an earlier one is still there {GONE_LIMIT_S:g} s after SIGKILL: {[p.pid for p in left]}")
    if start.files:  # last: a start that comes late writes no files either
        put_files(start.folder, start.files)


def put_files(folder: str, files: dict[str, str]) -> None:
    """Write `files` into `folder`, readable by this user only. Each is replaced atomically: the run may read it.

    Raises:
        Refused: others can write to the folder.
    """
    os.umask(0o077)
    os.makedirs(folder, exist_ok=True)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise Refused(f"{folder} is no folder of user {os.geteuid()} that only they can write to: remove it")
    for name, content in files.items():
        descriptor, aside = tempfile.mkstemp(prefix=f".{name}.", dir=folder)  # several processes may start at once
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
        os.replace(aside, os.path.join(folder, name))


def _say(text: str) -> None:
    """Print a line, unless nobody reads it any more: `ssh` may have ended."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def _detach() -> None:
    """Continue without a parent, like a process of a login: Ray kills the descendants of an actor that ends, but not
    what has left their tree. Its actors have a lower priority and SIGINT blocked.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with contextlib.suppress(PermissionError):  # root may raise it
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


async def _serve_order(order: Order) -> None:
    agent = Agent(order)
    for number in (signal.SIGTERM, signal.SIGINT):  # a batch system sends them to all; the launcher stops in order
        signal.signal(number, signal.SIG_IGN)
    if order.detached:
        ends = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ends), sys.stdin)
        reading = asyncio.create_task(ends.read())
        reading.add_done_callback(lambda _: agent.end("what started it has ended"))
    _say(await agent.serve())


async def _serve_pod(run_dir: Path, host: str) -> None:
    """Serve one launch of the run after the other, until SIGTERM."""
    stop = asyncio.Event()
    agent: Agent | None = None
    why = ""

    def end() -> None:
        stop.set()
        if agent is not None:
            agent.end("it was asked to end")

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    while not stop.is_set():
        read = partial(order_in, run_dir, host, secrets.randbits(62))
        if (order := read()) is not None:
            agent = Agent(order)
            before, why = why, await agent.serve(read)
            if why != before:  # until the next launch it finds the last one's address again and again
                _say(why)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_S)


def order_in(run_dir: Path, host: str, incarnation: int) -> Order | None:
    """Return the order for the pod of `host`, by the files of the run; None if there is no launch yet."""
    try:
        secret = RunSecret.load(run_dir / SECRET_FILE).http()
        url = (run_dir / AGENTS_FILE).read_text()
    except FileNotFoundError:
        return None
    except SecretError:
        if (run_dir / SECRET_FILE).exists():
            raise
        return None
    return Order(url, host, incarnation, secret.token, secret.certificate)


def answer(question: Question, began: float) -> Findings:
    """Answer a question about this host, on which this program was started at the time `began`."""
    seen = not question.marker or os.path.isfile(os.path.join(question.fileroot, question.marker))
    enter = make = ""
    try:
        os.chdir(question.working_folder or ".")
    except OSError as error:
        enter = error.strerror or str(error)
    try:
        if not question.marker:
            os.makedirs(question.fileroot, mode=0o700, exist_ok=True)
            make = "" if os.access(question.fileroot, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        make = error.strerror or str(error)
    return Findings(bind_error(question.address), enter, seen, make, began, time.time())


def main(began: float = 0.0) -> NoReturn:
    """Run the program, which was started at the time `began`."""
    adopt_orphans()
    if sys.argv[1:]:
        asyncio.run(_serve_pod(Path(sys.argv[1]), sys.argv[2]))
        sys.exit(EXIT_FAILED)  # with 0 the host's Job would be complete: a drained pod would get no successor
    try:
        order: Order | Question = json_decoder(Order | Question).decode(read_line())
    except msgspec.DecodeError as error:
        sys.exit(f"no order came over standard input: {error}")
    if isinstance(order, Question):
        print(msgspec.json.encode(answer(order, began)).decode(), flush=True)
        sys.exit(0)
    if order.detached:
        _detach()
        adopt_orphans()
    asyncio.run(_serve_order(order))
    sys.exit(0)


def read_line() -> bytes:
    """Read and return the first line of standard input byte by byte, and leave the rest."""
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return bytes(line)


if __name__ == "__main__":
    main()
