"""The receiving end of push-pull: a background thread, so that the process may compute in its main thread."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket as os_socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm.authentication import SourceLog
from asyncrl.comm.codec import CodecError
from asyncrl.comm.push_pull import messages
from asyncrl.comm.push_pull.outbox import RecentIds
from asyncrl.comm.security import SocketSecurity
from asyncrl.comm.sockets import Context, bind, peer_address, receive, send
from asyncrl.comm.trajectory_codec import decode_each

_log = logging.getLogger(__name__)

REMEMBERED_IDS = 100_000  # some 10 MB; far more rollouts than any run finishes within a few resend intervals
_SOCKET_HIGH_WATER = 16  # batches in libzmq's own buffer per pusher
_REPLIES_HIGH_WATER = 100_000  # acknowledgements: more than any pusher has trajectories in flight, some 10 bytes each
_MESSAGES_PER_TURN = 64  # read at most so many before looking whether the puller was closed
_CLOSE_LINGER_MS = 500  # for the acknowledgements of what was accepted just before `close`
_ROOM_WAIT_S = 1.0  # a full queue is looked at again at least so often


class _Closed(Exception):
    """The puller was closed while it waited for room."""


@dataclass(slots=True)
class PullerCounters:
    """What arrived: each trajectory counts in one of the first four; refused handshakes in the last."""

    received: int = 0
    """Accepted by the consumer."""
    duplicates: int = 0
    """Seen before; acknowledged again."""
    malformed: int = 0
    """Not decodable, or too large."""
    refused: int = 0
    """The consumer raised; not acknowledged, so it comes again."""
    unauthenticated: int = 0
    """Connections that failed the handshake."""


class TrajectoryPuller:
    """Receives trajectories at `endpoint`, drops duplicates, acknowledges what its consumer has accepted.

    Without `on_message` trajectories wait in a queue of at most `capacity`, to be fetched with `get` from any thread;
    being in the queue is being accepted. With it, `on_message(trajectory)` is called in the puller's thread, and its
    return is the acceptance; it may block for a while, which holds back the senders; if it raises, the trajectory
    comes again.

    Args:
        bind_host: address of the interface to listen on; also the host that `endpoint` names.
        security: the run's keys, or None for plaintext.
        capacity: trajectories in the queue at most.
        max_bytes: limit of one message; at least twice BATCH_BYTES, and above the pushers' `max_bytes`.
    """

    def __init__(
        self,
        bind_host: str,
        security: SocketSecurity | None,
        *,
        capacity: int = 1024,
        on_message: Callable[[Trajectory], None] | None = None,
        max_bytes: int = messages.DEFAULT_MAX_BYTES,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity} leaves no room for a trajectory: use at least 1")
        if max_bytes < 2 * messages.BATCH_BYTES:
            raise ValueError(
                f"max_bytes={max_bytes} is less than a message of small ones: use at least {2 * messages.BATCH_BYTES}"
            )
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._queue: queue.SimpleQueue[Trajectory] = queue.SimpleQueue()
        self._on_message = on_message
        self._sender = b""  # of the message in hand
        self._unacknowledged: list[int] = []  # what of it is accepted
        self._counters = PullerCounters()
        self._seen = RecentIds(REMEMBERED_IDS)
        self._log = SourceLog("trajectory")
        self._room = threading.Event()
        self._closing = threading.Event()
        self._waker, self._wakened = os_socket.socketpair()
        self._context = Context()
        # What is up to twice too large is still read, counted and refused by name; beyond, libzmq cuts the connection.
        self._socket, self.endpoint, self._gate = bind(
            self._context,
            bind_host,
            security,
            requests_high_water=_SOCKET_HIGH_WATER,
            replies_high_water=_REPLIES_HIGH_WATER,
            max_frame_bytes=2 * max_bytes,
        )
        self._thread = threading.Thread(target=self._run, name="trajectory-puller", daemon=True)
        self._thread.start()

    @property
    def counters(self) -> PullerCounters:
        """Counts so far."""
        self._counters.unauthenticated = self._gate.refused
        return self._counters

    @property
    def queued(self) -> int:
        """Trajectories accepted and not yet fetched."""
        return self._queue.qsize()

    def get(self, timeout_s: float = 0.0) -> Trajectory | None:
        """The next trajectory, waiting up to `timeout_s` seconds for it; None if there is none."""
        try:
            trajectory = self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None
        self._room.set()
        return trajectory

    def close(self) -> None:
        """Stop receiving. What was accepted is acknowledged and can be fetched; the rest stays with its sender."""
        self._closing.set()
        self._room.set()
        with contextlib.suppress(OSError):  # closed before
            self._waker.send(b"w")
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakened, zmq.POLLIN)
        try:
            while not self._closing.is_set():
                poller.poll()
                self._read()
        except _Closed:
            _log.debug("closed while the queue was full")
        finally:
            self._socket.close(linger=_CLOSE_LINGER_MS)
            self._context.term()
            self._waker.close()
            self._wakened.close()

    def _read(self) -> None:
        """Take what has arrived.

        Each message is acknowledged by itself: its sender prepares the next while this end decodes what it holds.
        """
        for _ in range(_MESSAGES_PER_TURN):
            if (frames := receive(self._socket)) is None:
                return
            self._take(frames)

    def _take(self, frames: list[zmq.Frame]) -> None:
        """Decode and deliver one message, which holds one or more trajectories."""
        self._sender = frames[0].bytes
        numbers: list[int] = []
        try:
            numbers = messages.decode_numbers(frames[1].buffer)
            decoded = decode_each([frame.buffer for frame in frames[2:]], max_bytes=self._max_bytes)
            if len(decoded) != len(numbers):
                raise CodecError(f"message has {len(numbers)} numbers for {len(decoded)} trajectories")
        except CodecError as error:
            self._refuse(frames, numbers, error)
            return
        try:
            for number, trajectory in zip(numbers, decoded, strict=True):
                if isinstance(trajectory, CodecError):
                    self._refuse(frames, [number], trajectory)
                elif self._accept(trajectory):
                    self._unacknowledged.append(number)
        finally:
            self._acknowledge()

    def _accept(self, trajectory: Trajectory) -> bool:
        """Deliver what is not a duplicate; True if it is to be acknowledged."""
        if trajectory.rollout_id in self._seen:
            self._counters.duplicates += 1
            return True
        if self._on_message is None:
            self._await_room()
            self._queue.put(trajectory)
        elif not self._call(self._on_message, trajectory):
            return False
        self._seen.add(trajectory.rollout_id)
        self._counters.received += 1
        return True

    def _call(self, on_message: Callable[[Trajectory], None], trajectory: Trajectory) -> bool:
        try:
            on_message(trajectory)
        except Exception:
            self._counters.refused += 1
            _log.exception("trajectory %r was not accepted, it will come again", trajectory.rollout_id)
            return False
        return True

    def _await_room(self) -> None:
        """Return once the queue has room; what was accepted so far is acknowledged first."""
        while self._queue.qsize() >= self._capacity:
            self._acknowledge()
            self._room.clear()
            if self._queue.qsize() >= self._capacity:  # else `get` made room just before the clear
                self._room.wait(_ROOM_WAIT_S)
            if self._closing.is_set():
                raise _Closed

    def _refuse(self, frames: list[zmq.Frame], numbers: list[int], error: CodecError) -> None:
        """Count and log what is malformed, and tell its sender so that it is not sent again."""
        self._counters.malformed += 1
        self._log.note(peer_address(frames), str(error))
        if numbers:
            self._reply(messages.Refused(numbers, str(error)[: messages.MAX_REASON]))

    def _acknowledge(self) -> None:
        if self._unacknowledged:
            self._reply(messages.Accepted(self._unacknowledged))
            self._unacknowledged = []

    def _reply(self, reply: messages.Reply) -> None:
        if not send(self._socket, [self._sender, messages.encode(reply)]):
            _log.debug("a sender takes no acknowledgement now; it will send again and be answered then")
