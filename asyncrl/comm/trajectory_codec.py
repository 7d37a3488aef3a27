"""Trajectories as messages: all token arrays joined end to end, so that the cost follows tokens, not samples.

One message carries one trajectory or many: what numpy and msgpack cost per call is paid once for all of them.

Arrays, all of shape [T] with T the tokens of all samples of all trajectories:

    tokens           int32    at least 0
    versions         int32    at least -1
    behave_logprobs  float32  finite
    loss_mask        uint8    0 or 1

Meta: `trajectories`, a list with one row per trajectory:

    [rollout_id, prompt_id, order, metrics, lengths, rewards, truncated]

the last three with one entry per sample: tokens (at least 1), a finite float64, a bool.

The bounds are checked once, where bytes arrive: a receiver must not trust what it gets, and its refusal comes back to
the sender, so an agent's fault is raised where it was made. Decoded samples are read-only views into the message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.comm.codec import DEFAULT_MAX_BYTES, JSON, Array, CodecError, Frame, Message, decode, encode_joined

KIND = "trajectories"
MAX_ID_LENGTH = 256
_TOKEN_ARRAYS: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype(np.int32),
    "versions": np.dtype(np.int32),
    "behave_logprobs": np.dtype(np.float32),
    "loss_mask": np.dtype(np.uint8),
}
_BYTES_PER_TOKEN = sum(dtype.itemsize for dtype in _TOKEN_ARRAYS.values())
_INT, _FLOAT, _BOOL, _NUMBERS = (frozenset(kinds) for kinds in ((int,), (float,), (bool,), (int, float)))


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A trajectory ready to be joined with others: its row, and the samples' arrays in the dtypes of the wire."""

    row: list[JSON]
    parts: tuple[list[Array], ...]
    nbytes: int


def prepare(trajectory: Trajectory) -> Prepared:
    """The part of encoding that can fail for one trajectory; copies nothing.

    Raises:
        CodecError: it has no samples, an id is no short string, or an array cannot take the dtype of the wire.
    """
    samples = trajectory.samples
    if not samples:
        raise CodecError(f"trajectory {trajectory.rollout_id!r} has no samples: a rejected rollout is not sent")
    lengths = [len(sample.tokens) for sample in samples]
    row: list[JSON] = [
        trajectory.rollout_id,
        trajectory.prompt_id,
        trajectory.order,
        {name: float(value) for name, value in trajectory.metrics.items()},
        lengths,
        [float(sample.reward) for sample in samples],
        [bool(sample.truncated) for sample in samples],
    ]
    _check_row(row)
    parts = (
        _on_the_wire("tokens", [sample.tokens for sample in samples]),
        _on_the_wire("versions", [sample.versions for sample in samples]),
        _on_the_wire("behave_logprobs", [sample.behave_logprobs for sample in samples]),
        _on_the_wire("loss_mask", [sample.loss_mask for sample in samples]),
    )
    return Prepared(row, parts, _BYTES_PER_TOKEN * sum(lengths))


def encode_prepared(trajectories: Sequence[Prepared], *, max_bytes: int = DEFAULT_MAX_BYTES) -> list[Frame]:
    """The two frames of these trajectories, at least one.

    Raises:
        CodecError: they are larger than `max_bytes`.
    """
    meta = {"trajectories": [trajectory.row for trajectory in trajectories]}
    parts = {
        name: [part for trajectory in trajectories for part in trajectory.parts[column]]
        for column, name in enumerate(_TOKEN_ARRAYS)
    }
    return encode_joined(KIND, meta, parts, max_bytes=max_bytes)


def encode_trajectories(trajectories: Iterable[Trajectory], *, max_bytes: int = DEFAULT_MAX_BYTES) -> list[Frame]:
    """The two frames of these trajectories, at least one.

    Raises:
        CodecError: as `prepare` and `encode_prepared`.
    """
    return encode_prepared([prepare(trajectory) for trajectory in trajectories], max_bytes=max_bytes)


def decode_trajectories(frames: Sequence[Frame], *, max_bytes: int = DEFAULT_MAX_BYTES) -> list[Trajectory]:
    """The trajectories in `frames`.

    Raises:
        CodecError: the frames are malformed or larger than `max_bytes`, or a value is out of the bounds above.
    """
    decoded = decode_each(frames, max_bytes=max_bytes)
    for trajectory in decoded:
        if isinstance(trajectory, CodecError):
            raise trajectory
    return [trajectory for trajectory in decoded if isinstance(trajectory, Trajectory)]


def decode_each(frames: Sequence[Frame], *, max_bytes: int = DEFAULT_MAX_BYTES) -> list[Trajectory | CodecError]:
    """For every trajectory in `frames`: itself, or what is wrong with it.

    Raises:
        CodecError: the frames are malformed or larger than `max_bytes` as a whole.
    """
    return _decode(decode(frames, max_bytes=max_bytes))


def to_message(trajectory: Trajectory) -> Message:
    """The message of one trajectory; `encode_trajectories` copies less and takes many.

    Raises:
        CodecError: as `prepare`.
    """
    prepared = prepare(trajectory)
    arrays = {name: np.concatenate(parts) for name, parts in zip(_TOKEN_ARRAYS, prepared.parts, strict=True)}
    return Message(KIND, {"trajectories": [prepared.row]}, arrays)


def from_message(message: Message) -> Trajectory:
    """The first trajectory in `message`.

    Raises:
        CodecError: it holds none, or one with a value out of the bounds above.
    """
    trajectory = _decode(message)[0]
    if isinstance(trajectory, CodecError):
        raise trajectory
    return trajectory


def _decode(message: Message) -> list[Trajectory | CodecError]:
    rows = _rows(message)
    columns = _columns(message, sum(sum(row[4]) for row in rows))
    sound = _fault(columns) is None  # one look at all of them; only if that finds a fault, one at each
    decoded: list[Trajectory | CodecError] = []
    start = 0
    for row in rows:
        end = start + sum(row[4])
        try:
            _check_row(row)
            if not sound and (fault := _fault([column[start:end] for column in columns])) is not None:
                raise CodecError(fault)
            decoded.append(_trajectory(row, columns, start))
        except CodecError as error:
            decoded.append(error)
        start = end
    return decoded


def _trajectory(row: list[Any], columns: list[Array], start: int) -> Trajectory:
    rollout_id, prompt_id, order, metrics, lengths, rewards, truncated = row
    tokens, versions, logprobs, mask = columns
    samples = []
    for length, reward, cut in zip(lengths, rewards, truncated, strict=True):
        end = start + length
        samples.append(
            Sample(tokens[start:end], mask[start:end], logprobs[start:end], versions[start:end], reward, cut)
        )
        start = end
    return Trajectory(rollout_id, prompt_id, order, tuple(samples), metrics)


def _on_the_wire(name: str, parts: list[Array]) -> list[Array]:
    """The parts in the dtype of the wire."""
    dtype = _TOKEN_ARRAYS[name]
    return [part if part.dtype == dtype else _convert(name, part) for part in parts]


def _convert(name: str, part: Array) -> Array:
    """`part` in the dtype of the wire; floats are rounded, everything else must keep its value."""
    dtype = _TOKEN_ARRAYS[name]
    converted: Array = part.astype(dtype)
    if np.can_cast(part.dtype, dtype, "same_kind") and (dtype.kind == "f" or np.array_equal(part, converted)):
        return converted
    raise CodecError(f"trajectory.{name} has dtype {part.dtype} and values {dtype} cannot hold: build it as {dtype}")


def _rows(message: Message) -> list[list[Any]]:
    """The rows, of which the lengths are sound: they say which tokens belong to which trajectory."""
    if message.kind != KIND:
        raise CodecError(f"message is of kind {message.kind!r:.80}, expected {KIND!r}")
    rows = message.meta.get("trajectories")
    if type(rows) is not list or not rows or len(message.meta) != 1:
        raise CodecError("meta of a message of trajectories must be a list of them and nothing else")
    for row in rows:
        if type(row) is not list or len(row) != 7:
            raise CodecError(f"trajectory {row!r:.80} is not a row of 7 values")
        lengths = row[4]
        if type(lengths) is not list or not lengths or not _INT.issuperset(map(type, lengths)) or min(lengths) < 1:
            raise CodecError(f"trajectory.lengths is {lengths!r:.80}: use a list of at least one positive integer")
    return rows


def _columns(message: Message, tokens: int) -> list[Array]:
    """The arrays in order, of which dtypes and shapes are sound."""
    if message.arrays.keys() != _TOKEN_ARRAYS.keys():
        raise CodecError(f"trajectories have the arrays {list(message.arrays)!r:.200}, expected {list(_TOKEN_ARRAYS)}")
    for name, dtype in _TOKEN_ARRAYS.items():
        array = message.arrays[name]
        if array.dtype != dtype or array.shape != (tokens,):
            raise CodecError(f"trajectory.{name} is {array.dtype} {array.shape}, expected {dtype} ({tokens},)")
    return [message.arrays[name] for name in _TOKEN_ARRAYS]


def _check_row(row: list[Any]) -> None:
    rollout_id, prompt_id, order, metrics, lengths, rewards, truncated = row
    for name, value in (("rollout_id", rollout_id), ("prompt_id", prompt_id)):
        if type(value) is not str or not 0 < len(value) <= MAX_ID_LENGTH:
            raise CodecError(f"trajectory.{name} is {value!r:.80}: use a string of 1 to {MAX_ID_LENGTH} characters")
    if type(order) is not int or not -(1 << 63) <= order < 1 << 63:
        raise CodecError(f"trajectory.order is {order!r:.80}: use an integer of 64 bits")
    if type(metrics) is not dict or not _NUMBERS.issuperset(map(type, metrics.values())):
        raise CodecError(f"trajectory.metrics is {metrics!r:.200}: use a map of names to numbers")
    if type(rewards) is not list or len(rewards) != len(lengths) or not _FLOAT.issuperset(map(type, rewards)):
        raise CodecError(f"trajectory.rewards is {rewards!r:.80}: use one float per sample")
    if not all(map(math.isfinite, rewards)):
        raise CodecError(f"trajectory.rewards is {rewards!r:.80}: use finite numbers")
    if type(truncated) is not list or len(truncated) != len(lengths) or not _BOOL.issuperset(map(type, truncated)):
        raise CodecError(f"trajectory.truncated is {truncated!r:.80}: use one bool per sample")


def _fault(columns: Sequence[Array]) -> str | None:
    """What is out of bounds in these tokens; None if nothing is."""
    tokens, versions, logprobs, mask = columns
    if (low := np.minimum.reduce(tokens)) < 0:
        return f"trajectory.tokens has {low}: token ids are at least 0"
    if (low := np.minimum.reduce(versions)) < -1:
        return f"trajectory.versions has {low}: versions are at least 0, or -1 where nothing was generated"
    if (high := np.maximum.reduce(mask)) > 1:
        return f"trajectory.loss_mask has {high}: use 0 or 1"
    if not np.isfinite(logprobs).all():
        return "trajectory.behave_logprobs holds a NaN or an infinity"
    return None
