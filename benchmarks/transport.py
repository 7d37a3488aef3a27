"""Trajectories from pusher to puller, acknowledged, against plain ZMQ PUSH-PULL of the same bytes.

    python benchmarks/transport.py [--rounds 7] [--share 1]

What moves: trajectories of 1k and of 16k tokens, as one sample and as a group of 8 samples, encryption off and on.

asyncrl    the whole way, from a Trajectory at the sender to a Trajectory at the receiver: IN_FLIGHT callers await
           `TrajectoryPusher.push`, which returns when the puller's consumer has accepted the trajectory: encoded,
           held until acknowledged, decoded, de-duplicated, checked; those of about the same time share a message.
plain      the bytes alone: one PUSH socket sends the two frames of one encoded trajectory, the same buffers each
           time, one PULL socket receives them without a copy and looks at nothing; no acknowledgement. The payload of
           16k tokens is lent to libzmq, that of 1k tokens copied: each is the faster way.

Alike on all sides: a sending and a receiving process, made afresh for each run, with the allocator's settings and the
frozen garbage collector of asyncrl's workers and one thread of numpy; CURVE keys; one I/O thread per context; IN_FLIGHT
trajectories at most (plain: the high-water mark of each socket). The rate is counted at the receiver, from the first
arrival to the last. The two take turns; the ratio is the median of the rounds' ratios. CPU is that of all threads of
both processes.

The target holds for encryption off; a row below it says MISSED. `--share 0.1` sends a tenth: too little to judge by.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop
import zmq
from common import Table, by_turns, parser, verdict

from asyncrl.api import Sample, Trajectory
from asyncrl.comm.push_pull import TrajectoryPuller, TrajectoryPusher
from asyncrl.comm.security import PeerGate, RunSecret, SocketSecurity
from asyncrl.comm.sockets import Context
from asyncrl.comm.trajectory_codec import encode_trajectories
from asyncrl.runtime.plan import MALLOC

HOST = "127.0.0.1"
TARGET_RATIO = 0.7
IN_FLIGHT = 256  # the pusher's default high-water mark
LIMIT_S = 60.0
CASES = ((1024, 1, 20_000), (1024, 8, 20_000), (16_384, 1, 4_000), (16_384, 8, 4_000))  # tokens, samples, trajectories


@dataclass(frozen=True)
class Case:
    """`samples` samples of `tokens` tokens in all, `count` times."""

    tokens: int
    samples: int
    encrypted: bool
    count: int

    @property
    def security(self) -> SocketSecurity | None:
        """Keys that both processes derive alike."""
        return RunSecret(b"benchmark" * 3 + b"-key5").sockets() if self.encrypted else None

    def trajectory(self) -> Trajectory:
        """The trajectory to send, but for its id."""
        length = self.tokens // self.samples
        tokens = np.arange(length, dtype=np.int32)
        sample = Sample(tokens, np.ones(length, np.uint8), -np.ones(length, np.float32), tokens, 1.0)
        return Trajectory("rollout", "prompt-000001", 1, (sample,) * self.samples, {"turns": 1.0})


@dataclass(frozen=True)
class Reading:
    """Trajectories per second at the receiver, and CPU microseconds per trajectory of both processes."""

    rate: float
    cpu_us: float


def asyncrl_receiver(case: Case, results: Connection) -> None:
    meter, done = Meter(case.count), threading.Event()

    def accept(_: Trajectory) -> None:
        if meter.tick():
            done.set()

    puller = TrajectoryPuller(HOST, case.security, on_message=accept)
    results.send(puller.endpoint)
    done.wait(LIMIT_S)
    puller.close()
    results.send((meter.rate, meter.cpu_s))


def asyncrl_sender(case: Case, endpoint: str, results: Connection) -> None:
    async def send() -> None:
        pusher = TrajectoryPusher([endpoint], case.security, identity="benchmark", high_water=IN_FLIGHT)
        base = case.trajectory()
        ready = [dataclasses.replace(base, rollout_id=f"rollout-{i:08d}") for i in range(case.count)]
        waiting = iter(ready)

        async def push_in_turn() -> None:
            for trajectory in waiting:
                await pusher.push(trajectory, LIMIT_S)

        started = time.process_time()
        await asyncio.gather(*(push_in_turn() for _ in range(IN_FLIGHT)))
        results.send(time.process_time() - started)
        await pusher.close(LIMIT_S)

    uvloop.run(send())


def plain_receiver(case: Case, results: Connection) -> None:
    meter = Meter(case.count)
    context = Context()
    with context.socket(zmq.PULL) as socket:
        socket.rcvhwm = IN_FLIGHT
        PeerGate(context, socket, case.security)
        socket.bind(f"tcp://{HOST}:*")
        endpoint: Any = socket.last_endpoint
        results.send(endpoint.decode())
        while True:
            socket.recv_multipart(copy=False)
            if meter.tick():
                break
        results.send((meter.rate, meter.cpu_s))
    context.term()


def plain_sender(case: Case, endpoint: str, results: Connection) -> None:
    header, payload = encode_trajectories([case.trajectory()])
    copy = len(payload) < zmq.COPY_THRESHOLD
    context = Context()
    with context.socket(zmq.PUSH) as socket:
        socket.sndhwm = IN_FLIGHT
        if case.security is not None:
            case.security.secure_client(socket)
        socket.connect(endpoint)
        started = time.process_time()
        for _ in range(case.count):
            socket.send(header, zmq.SNDMORE)
            socket.send(payload, 0, copy=copy)
    context.term()  # returns when the last byte has been handed to the kernel
    results.send(time.process_time() - started)


class Meter:
    """Rate and CPU time of this process from the first of `count` arrivals to the last."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._seen = 0

    def tick(self) -> bool:
        """Note an arrival; True at the last one."""
        self._seen += 1
        if self._seen == 1:
            self._first, self._first_cpu = time.perf_counter(), time.process_time()
        elif self._seen == self._count:
            self.rate = (self._count - 1) / (time.perf_counter() - self._first)
            self.cpu_s = time.process_time() - self._first_cpu
            return True
        return False


Receiver = Callable[[Case, Connection], None]
Sender = Callable[[Case, str, Connection], None]


def measure(case: Case, ends: tuple[Receiver, Sender]) -> Reading:
    """One run of `case`, in two fresh processes."""
    receiver, sender = ends
    spawn = multiprocessing.get_context("spawn")
    receiving, receiver_end = spawn.Pipe()
    sending, sender_end = spawn.Pipe()
    receiving_process = spawn.Process(target=_run, args=(receiver, case, receiver_end), daemon=True)
    receiving_process.start()
    arguments = (sender, case, _receive(receiving), sender_end)
    sending_process = spawn.Process(target=_run, args=arguments, daemon=True)
    sending_process.start()
    rate, receiver_cpu_s = _receive(receiving)
    sender_cpu_s = _receive(sending)
    for process in (receiving_process, sending_process):
        process.join(LIMIT_S)
    return Reading(rate, 1e6 * (receiver_cpu_s + sender_cpu_s) / case.count)


def _run(role: Callable[..., None], *arguments: Any) -> None:
    gc.collect()
    gc.freeze()
    role(*arguments)


def _receive(connection: Connection) -> Any:
    if not connection.poll(LIMIT_S):
        raise TimeoutError(f"a process of the benchmark said nothing for {LIMIT_S:g} s")
    return connection.recv()


CONTENDERS = ((plain_receiver, plain_sender), (asyncrl_receiver, asyncrl_sender))


def main() -> None:
    """Print the table."""
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=7)
    command.add_argument("--share", type=float, default=1.0, help="of the trajectories")
    args = command.parse_args()
    os.environ.update(MALLOC | {"OMP_NUM_THREADS": "1"})  # for the processes started from here
    heads = ["asyncrl/s", "plain/s", "ratio", "CPU us, asyncrl", "plain", f">= {TARGET_RATIO}"]
    table = Table("tokens, samples", *heads)
    for encrypted in (False, True):
        for tokens, samples, count in CASES:
            case = Case(tokens, samples, encrypted, round(args.share * count))
            plain, own = by_turns(CONTENDERS, args.rounds, partial(measure, case))
            share = statistics.median(a.rate / b.rate for a, b in zip(own, plain, strict=True))
            cells = [f"{statistics.median(each.rate for each in of):.0f}" for of in (own, plain)]
            cells += [f"{share:.2f}", *(f"{statistics.median(each.cpu_us for each in of):.1f}" for of in (own, plain))]
            cells.append("" if encrypted else verdict(share, TARGET_RATIO, at_least=True))
            table.row(f"{tokens}, {samples}{', encrypted' * encrypted}", *cells)


if __name__ == "__main__":
    main()
