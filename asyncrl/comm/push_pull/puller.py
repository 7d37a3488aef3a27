"""The receiving end of push-pull, and its messages. A background thread receives, so that the process may compute in
its main thread.

    pusher ─▶ puller    [ Numbers, header, payload ]    trajectories of `trajectory_codec` and their numbers
    puller ─▶ pusher    [ Accepted | Refused ]

Each pusher numbers its trajectories. Those pushed at about the same time share a message of up to BATCH_TRAJECTORIES
and BATCH_BYTES, because most of the cost of a small trajectory is per message. A message of more than BATCH_BYTES holds
a single trajectory, so that a refusal for size affects no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeAlias

import msgspec
import zmq

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm.ended_rollouts.recent_ids import AT_LEAST, RecentIds
from asyncrl.comm.security.peer_gate import SourceLog
from asyncrl.comm.security.run_secret import SocketSecurity
from asyncrl.comm.sockets import Frame, SocketThread, peer_address
from asyncrl.comm.trajectory_codec import CodecError, decode_each, decode_typed
from asyncrl.comm.typed import msgpack_decoder

_log = logging.getLogger(__name__)

BATCH_BYTES = 1 << 20  # of arrays in one message: above this size the cost per message is negligible
BATCH_TRAJECTORIES = 64  # in one message: a quarter of what a pusher holds by default, so that both ends have work
MAX_REASON = 500  # characters of a refusal's reason
DEFAULT_MAX_BYTES = 256 << 20
"""Limit of one trajectory in bytes: 20 million tokens."""
_SOCKET_HIGH_WATER = 16  # batches in libzmq's own buffer per pusher
_REPLIES_HIGH_WATER = 100_000  # acknowledgements: more than any pusher has trajectories in flight, some 10 bytes each

Numbers: TypeAlias = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]


class Accepted(msgspec.Struct, tag="accepted", frozen=True):
    """The trajectories with these numbers were accepted. Duplicates get this reply again."""

    numbers: Numbers


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The trajectories with these numbers are invalid and must not be sent again."""

    numbers: Numbers
    reason: str


Reply: TypeAlias = Accepted | Refused
_NUMBERS = msgpack_decoder(Numbers)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgpack_decoder(Reply)


def encode(message: list[int] | Reply) -> bytes:
    """Return the frame of numbers or of a reply."""
    return msgspec.msgpack.encode(message)


def decode_numbers(frame: Frame) -> list[int]:
    """Return the numbers in the first frame of a pusher's message.

    Raises:
        CodecError: the frame is malformed.
    """
    return decode_typed(_NUMBERS, frame, "numbers of trajectories")


def decode_reply(frame: Frame) -> Reply:
    """Decode a puller's reply.

    Raises:
        CodecError: it is not a puller's reply.
    """
    return decode_typed(_REPLY, frame, "reply")


@dataclass(slots=True)
class PullerCounters:
    """Counters of arrivals. Each trajectory is counted in one of the first four, and a refused handshake in the last. A
    message that cannot be decoded counts as one.
    """

    received: int = 0
    """Accepted by the consumer."""
    duplicates: int = 0
    """Received before; acknowledged again."""
    malformed: int = 0
    """Not decodable, too large, or invalid for the consumer."""
    refused: int = 0
    """The consumer raised an error; not acknowledged, so it is sent again."""
    unauthenticated: int = 0
    """Connections that failed the handshake."""


class InvalidTrajectory(ValueError):
    """The consumer will never accept this trajectory; the message has the reason."""


class Deliveries:
    """Decodes messages, drops duplicates, and passes each new trajectory to the consumer. No sockets.

    Args:
        on_message: the consumer, see `TrajectoryPuller`.
        max_bytes: limit of one message.
        remembered: number of ids that are kept to recognize duplicates.
        accepted: ids that an earlier process accepted and this one still has.
    """

    def __init__(
        self, on_message: Callable[[Trajectory], None], max_bytes: int, remembered: int, accepted: Iterable[str] = ()
    ) -> None:
        self._on_message, self._max_bytes = on_message, max_bytes
        self._seen: RecentIds[bool] = RecentIds(remembered)
        for rollout_id in accepted:
            self._seen.put(rollout_id, True)
        self.counters = PullerCounters()
        self._log = SourceLog("trajectory")

    def take(self, frames: list[zmq.Frame], reply: Callable[[Reply], None]) -> None:
        """Decode and deliver one message, which holds one or more trajectories.

        Args:
            frames: the message, without the name of its connection.
            reply: sends an answer to the message's sender.
        """
        numbers: list[int] = []
        try:
            numbers = decode_numbers(frames[0].buffer)
            decoded = decode_each([frame.buffer for frame in frames[1:]], max_bytes=self._max_bytes)
            if len(decoded) != len(numbers):
                raise CodecError(f"message has {len(numbers)} numbers for {len(decoded)} trajectories")
        except CodecError as error:
            self._refuse(frames, numbers, error, reply)
            return
        accepted: list[int] = []
        try:
            for number, trajectory in zip(numbers, decoded, strict=True):
                if isinstance(trajectory, CodecError):
                    self._refuse(frames, [number], trajectory, reply)
                    continue
                try:
                    if self._accept(trajectory):
                        accepted.append(number)
                except InvalidTrajectory as error:
                    self._refuse(frames, [number], error, reply)
        finally:
            if accepted:
                reply(Accepted(accepted))

    def _accept(self, trajectory: Trajectory) -> bool:
        """Deliver the trajectory unless it is a duplicate; return True if it must be acknowledged.

        Raises:
            InvalidTrajectory: the consumer will never accept it.
        """
        if trajectory.rollout_id in self._seen:
            self.counters.duplicates += 1
            return True
        try:
            self._on_message(trajectory)
        except InvalidTrajectory:
            raise
        except Exception:
            self.counters.refused += 1
            _log.exception("trajectory %r was not accepted, it will be sent again", trajectory.rollout_id)
            return False
        self._seen.put(trajectory.rollout_id, True)
        self.counters.received += 1
        return True

    def _refuse(
        self,
        frames: list[zmq.Frame],
        numbers: list[int],
        error: CodecError | InvalidTrajectory,
        reply: Callable[[Reply], None],
    ) -> None:
        """Count and log malformed trajectories; the reply makes their sender drop them."""
        self.counters.malformed += 1
        self._log.note(peer_address(frames), str(error))
        if numbers:
            reply(Refused(numbers, str(error)[:MAX_REASON]))


class TrajectoryPuller:
    """Receives trajectories at `endpoint`, drops duplicates, acknowledges what its consumer has accepted.

    The consumer, `on_message(trajectory)`, is called in the puller's thread and accepts by returning; it may block for
    a while, which slows the senders. If it raises `InvalidTrajectory`, the trajectory is refused for good, and `push`
    raises the reason at its sender. If it raises anything else, the trajectory is sent again.

    Args:
        bind_host: address of the interface to listen on; also the host that `endpoint` names.
        security: the run's keys, or None for plaintext.
        max_bytes: limit of one message; at least twice BATCH_BYTES, and above the pushers' `max_bytes`.
        remembered: number of ids that are kept to recognize duplicates (`ids_remembered`).
        accepted: ids that an earlier process accepted and this one still has. If the acknowledgement was lost with that
            process, the sender repeats the trajectory.
    """

    def __init__(
        self,
        bind_host: str,
        security: SocketSecurity | None,
        *,
        on_message: Callable[[Trajectory], None],
        max_bytes: int = DEFAULT_MAX_BYTES,
        remembered: int = AT_LEAST,
        accepted: Iterable[str] = (),
    ) -> None:
        if max_bytes < 2 * BATCH_BYTES:
            raise ValueError(
                f"max_bytes={max_bytes} is less than a message of small trajectories needs: use at least "
                f"{2 * BATCH_BYTES}"
            )
        self._deliveries = Deliveries(on_message, max_bytes, remembered, accepted)
        # A message of up to twice the limit is read, counted and refused. For a larger one libzmq ends the connection.
        self._io = SocketThread(
            bind_host,
            security,
            self._on_message,
            name="trajectory-puller",
            requests_high_water=_SOCKET_HIGH_WATER,
            replies_high_water=_REPLIES_HIGH_WATER,
            max_frame_bytes=2 * max_bytes,
        )
        self.endpoint = self._io.endpoint
        self._io.start()

    @property
    def counters(self) -> PullerCounters:
        """Return the counts so far."""
        counters = self._deliveries.counters
        counters.unauthenticated = self._io.unauthenticated
        return counters

    def close(self) -> None:
        """Stop receiving. Accepted trajectories are acknowledged; the others stay with their senders."""
        self._io.close()

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        """Deliver one message and answer it at once: the sender prepares the next one while this end decodes."""
        sender, *message = frames
        self._deliveries.take(message, partial(self._reply, sender.bytes))

    def _reply(self, sender: bytes, reply: Reply) -> None:
        self._io.send([sender, encode(reply)])
