"""The receiving end of push-pull: a background thread, so that the process may compute in its main thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import zmq

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm.ended_rollouts.recent_ids import AT_LEAST, RecentIds
from asyncrl.comm.push_pull import messages
from asyncrl.comm.security.peer_gate import SourceLog
from asyncrl.comm.security.run_secret import SocketSecurity
from asyncrl.comm.sockets import SocketThread, peer_address
from asyncrl.comm.trajectory_codec import CodecError, decode_each

_log = logging.getLogger(__name__)

_SOCKET_HIGH_WATER = 16  # batches in libzmq's own buffer per pusher
_REPLIES_HIGH_WATER = 100_000  # acknowledgements: more than any pusher has trajectories in flight, some 10 bytes each


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

    def take(self, frames: list[zmq.Frame], reply: Callable[[messages.Reply], None]) -> None:
        """Decode and deliver one message, which holds one or more trajectories.

        Args:
            frames: the message, without the name of its connection.
            reply: sends an answer to the message's sender.
        """
        numbers: list[int] = []
        try:
            numbers = messages.decode_numbers(frames[0].buffer)
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
                reply(messages.Accepted(accepted))

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
        reply: Callable[[messages.Reply], None],
    ) -> None:
        """Count and log malformed trajectories; the reply makes their sender drop them."""
        self.counters.malformed += 1
        self._log.note(peer_address(frames), str(error))
        if numbers:
            reply(messages.Refused(numbers, str(error)[: messages.MAX_REASON]))


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
        max_bytes: int = messages.DEFAULT_MAX_BYTES,
        remembered: int = AT_LEAST,
        accepted: Iterable[str] = (),
    ) -> None:
        if max_bytes < 2 * messages.BATCH_BYTES:
            raise ValueError(
                f"max_bytes={max_bytes} is less than a message of small trajectories needs: use at least "
                f"{2 * messages.BATCH_BYTES}"
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

    def _reply(self, sender: bytes, reply: messages.Reply) -> None:
        self._io.send([sender, messages.encode(reply)])
