"""Trajectories as messages: all arrays joined end to end, so that the cost follows tokens, not trajectories or samples.

One message carries one trajectory or many: what numpy and msgpack cost per call is paid once for all of them. For the
same reason everything is in columns, of which types and bounds are checked whole.

Arrays; T are the tokens and S the samples of all trajectories, in order:

    tokens           int32    [T]  at least 0
    loss_mask        uint8    [T]  0 or 1
    behave_logprobs  float32  [T]  finite
    versions         int32    [T]  at least -1
    lengths          int64    [S]  tokens of each sample, at least 1
    rewards          float64  [S]  finite
    truncated        uint8    [S]  0 or 1

Meta: the lists `rollout_ids`, `prompt_ids`, `orders`, `metrics` and `sizes` (number of samples, at least 1), with one
entry per trajectory.

The bounds are checked once, where bytes arrive: a receiver must not trust what it gets, and its refusal comes back to
the sender, so an agent's fault is raised where it was made. Decoded columns are read-only views into the message,
and samples are made of them only for who asks for samples.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, cycle
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from asyncrl.api.trajectory import SampleColumns, Trajectory
from asyncrl.comm.codec import DEFAULT_MAX_BYTES, JSON, Array, CodecError, Column, Frame, Message, decode, encode_joined

KIND = "trajectories"
MAX_ID_LENGTH = 256
_DType: TypeAlias = np.dtype[Any]
_INT32: _DType = np.dtype(np.int32)
_FLOAT32: _DType = np.dtype(np.float32)
_UINT8: _DType = np.dtype(np.uint8)
_TOKEN_ARRAYS = {"tokens": _INT32, "loss_mask": _UINT8, "behave_logprobs": _FLOAT32, "versions": _INT32}
_SAMPLE_ARRAYS: dict[str, _DType] = {
    "lengths": np.dtype(np.int64),
    "rewards": np.dtype(np.float64),
    "truncated": _UINT8,
}
_TOKEN_DTYPES = [*_TOKEN_ARRAYS.values()]
_token_arrays = attrgetter(*_TOKEN_ARRAYS)
_META = ("rollout_ids", "prompt_ids", "orders", "metrics", "sizes")
_BYTES_PER_TOKEN = sum(dtype.itemsize for dtype in _TOKEN_ARRAYS.values())
_INT, _NUMBERS = frozenset((int,)), frozenset((int, float))


@dataclass(slots=True, eq=False)
class Prepared:
    """A trajectory ready to be joined with others: its samples' arrays in the dtypes of the wire."""

    trajectory: Trajectory
    metrics: dict[str, float]
    parts: list[Array]
    """tokens, loss_mask, behave_logprobs, versions of a sample, then those of the next."""
    lengths: list[int]
    rewards: list[float]
    truncated: list[bool] | list[int]
    nbytes: int


def prepare(trajectory: Trajectory) -> Prepared:
    """The part of encoding that can fail for one trajectory; copies nothing.

    Raises:
        CodecError: it has no samples, an id is no short string, or an array cannot take the dtype of the wire.
    """
    samples = trajectory.samples
    if not samples:
        raise CodecError(f"trajectory {trajectory.rollout_id!r} has no samples: a rejected rollout is not sent")
    metrics = {name: float(value) for name, value in trajectory.metrics.items()}
    _check_fields(trajectory.rollout_id, trajectory.prompt_id, trajectory.order, metrics)
    parts: list[Array] = []
    if isinstance(samples, SampleColumns):
        parts += _token_arrays(samples)
        lengths, rewards, truncated = samples.lengths.tolist(), samples.rewards.tolist(), samples.truncated.tolist()
    else:
        lengths, rewards, truncated = [], [], []
        for sample in samples:
            parts += _token_arrays(sample)
            lengths.append(len(sample.tokens))
            rewards.append(float(sample.reward))
            truncated.append(bool(sample.truncated))
    if [part.dtype for part in parts] != _TOKEN_DTYPES * (len(parts) // len(_TOKEN_DTYPES)):
        parts = [_convert(name, part) for name, part in zip(cycle(_TOKEN_ARRAYS), parts, strict=False)]
    if not all(map(math.isfinite, rewards)):
        raise CodecError(f"trajectory.rewards is {rewards!r:.80}: use finite numbers")
    return Prepared(trajectory, metrics, parts, lengths, rewards, truncated, _BYTES_PER_TOKEN * sum(lengths))


def encode_prepared(prepared: Sequence[Prepared], *, max_bytes: int = DEFAULT_MAX_BYTES) -> list[Frame]:
    """The two frames of these trajectories, at least one.

    Raises:
        CodecError: they are larger than `max_bytes`.
    """
    trajectories = [each.trajectory for each in prepared]
    meta: dict[str, JSON] = {
        "rollout_ids": [trajectory.rollout_id for trajectory in trajectories],
        "prompt_ids": [trajectory.prompt_id for trajectory in trajectories],
        "orders": [trajectory.order for trajectory in trajectories],
        "metrics": [each.metrics for each in prepared],
        "sizes": [len(each.lengths) for each in prepared],
    }
    parts = [*chain.from_iterable([each.parts for each in prepared])]
    lengths = [*chain.from_iterable([each.lengths for each in prepared])]
    rewards = chain.from_iterable([each.rewards for each in prepared])
    truncated = chain.from_iterable([each.truncated for each in prepared])
    by_token, by_sample = (sum(lengths),), (len(lengths),)
    packed = (
        struct.pack(f"<{len(lengths)}q", *lengths),
        struct.pack(f"<{len(lengths)}d", *rewards),
        bytes(truncated),
    )
    columns = {
        name: Column(dtype, by_token, parts[i :: len(_TOKEN_ARRAYS)])
        for i, (name, dtype) in enumerate(_TOKEN_ARRAYS.items())
    } | {
        name: Column(dtype, by_sample, [values])
        for (name, dtype), values in zip(_SAMPLE_ARRAYS.items(), packed, strict=True)
    }
    return encode_joined(KIND, meta, columns, max_bytes=max_bytes)


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
    fields, columns = _columns(decode(frames, max_bytes=max_bytes))
    token_ends = list(accumulate(columns.lengths.tolist()))
    sound = _fault(columns) is None  # one look at all; only if that finds a fault, at each
    decoded: list[Trajectory | CodecError] = []
    end = last = 0
    for rollout_id, prompt_id, order, metrics, size in zip(*fields, strict=True):
        start, end = end, end + size
        first, last = last, token_ends[end - 1]
        samples = SampleColumns(
            columns.tokens[first:last],
            columns.loss_mask[first:last],
            columns.behave_logprobs[first:last],
            columns.versions[first:last],
            columns.lengths[start:end],
            columns.rewards[start:end],
            columns.truncated[start:end],
        )
        try:
            _check_fields(rollout_id, prompt_id, order, metrics)
            if not sound and (fault := _fault(samples)) is not None:
                raise CodecError(fault)
            decoded.append(Trajectory(rollout_id, prompt_id, order, samples, metrics))
        except CodecError as error:
            decoded.append(error)
    return decoded


def _columns(message: Message) -> tuple[list[list[Any]], SampleColumns]:
    """The columns of meta and those of all samples, of sound dtypes and shapes: what is whose can be told from them."""
    if message.kind != KIND:
        raise CodecError(f"message is of kind {message.kind!r:.80}, expected {KIND!r}")
    meta, arrays = message.meta, message.arrays
    if meta.keys() != set(_META) or arrays.keys() != _TOKEN_ARRAYS.keys() | _SAMPLE_ARRAYS.keys():
        raise CodecError(f"trajectories have the fields {[*meta, *arrays]!r:.200}, expected those of this version")
    by_trajectory = [meta[name] for name in _META]
    for name, column in zip(_META, by_trajectory, strict=True):
        if type(column) is not list or not column or len(column) != len(by_trajectory[0]):
            raise CodecError(f"trajectory.{name} is {column!r:.80}: use a list of one entry per trajectory")
    sizes = by_trajectory[-1]
    if not _INT.issuperset(map(type, sizes)) or min(sizes) < 1:
        raise CodecError(f"trajectory.sizes is {sizes!r:.80}: use positive integers")
    by_sample = _arrays(message, _SAMPLE_ARRAYS, sum(sizes))
    lengths: list[int] = by_sample[0].tolist()
    if min(lengths) < 1:
        raise CodecError(f"trajectory.lengths is {lengths!r:.80}: use positive integers")
    return by_trajectory, SampleColumns(*_arrays(message, _TOKEN_ARRAYS, sum(lengths)), *by_sample)


def _arrays(message: Message, dtypes: dict[str, _DType], length: int) -> list[Array]:
    """The arrays named in `dtypes`, in that order."""
    for name, dtype in dtypes.items():
        array = message.arrays[name]
        if array.dtype != dtype or array.shape != (length,):
            raise CodecError(f"trajectory.{name} is {array.dtype} {array.shape}, expected {dtype} ({length},)")
    return [message.arrays[name] for name in dtypes]


def _convert(name: str, part: Array) -> Array:
    """`part` in the dtype of the wire; floats are rounded, everything else must keep its value."""
    dtype = _TOKEN_ARRAYS[name]
    converted: Array = part.astype(dtype)
    if np.can_cast(part.dtype, dtype, "same_kind") and (dtype.kind == "f" or np.array_equal(part, converted)):
        return converted
    raise CodecError(f"trajectory.{name} has dtype {part.dtype} and values {dtype} cannot hold: build it as {dtype}")


def _check_fields(rollout_id: object, prompt_id: object, order: object, metrics: object) -> None:
    for name, value in (("rollout_id", rollout_id), ("prompt_id", prompt_id)):
        if type(value) is not str or not 0 < len(value) <= MAX_ID_LENGTH:
            raise CodecError(f"trajectory.{name} is {value!r:.80}: use a string of 1 to {MAX_ID_LENGTH} characters")
    if type(order) is not int or not -(1 << 63) <= order < 1 << 63:
        raise CodecError(f"trajectory.order is {order!r:.80}: use an integer of 64 bits")
    if type(metrics) is not dict or not _NUMBERS.issuperset(map(type, metrics.values())):
        raise CodecError(f"trajectory.metrics is {metrics!r:.200}: use a map of names to numbers")


def _fault(samples: SampleColumns) -> str | None:
    """What is out of bounds in these samples; None if nothing is."""
    if (low := np.minimum.reduce(samples.tokens)) < 0:
        return f"trajectory.tokens has {low}: token ids are at least 0"
    if (high := np.maximum.reduce(samples.loss_mask)) > 1:
        return f"trajectory.loss_mask has {high}: use 0 or 1"
    if not np.isfinite(samples.behave_logprobs).all():
        return "trajectory.behave_logprobs holds a NaN or an infinity"
    if (low := np.minimum.reduce(samples.versions)) < -1:
        return f"trajectory.versions has {low}: versions are at least 0, or -1 where nothing was generated"
    if not np.isfinite(samples.rewards).all():
        return f"trajectory.rewards is {samples.rewards.tolist()!r:.80}: use finite numbers"
    if (high := np.maximum.reduce(samples.truncated)) > 1:
        return f"trajectory.truncated has {high}: use 0 or 1"
    return None
