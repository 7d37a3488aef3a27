"""Trajectories as messages: all arrays joined end to end, so that the cost follows tokens, not trajectories or samples.

One message carries one trajectory or many: what numpy and msgpack cost per call is paid once for all of them. For the
same reason everything is in columns, of which types and bounds are checked whole.

A trajectory's prompt, the longest run of tokens that all its samples begin with and that no policy generated (loss_mask
0, behave_logprobs 0, versions -1), is sent once and as tokens alone: 4 bytes a token in place of 13 in every sample.

Arrays; R are the trajectories of the message, S their samples, P the tokens of their prompts and T those that follow a
prompt, all in order:

    prompts          int32    [P]  at least 0
    tokens           int32    [T]  at least 0
    loss_mask        uint8    [T]  0 or 1
    behave_logprobs  float32  [T]  finite
    versions         int32    [T]  at least -1
    lengths          int64    [S]  tokens of each sample after the prompt, at least 0; at least 1 with the prompt's
    rewards          float64  [S]  finite
    truncated        uint8    [S]  0 or 1
    sizes            int64    [R]  samples of each trajectory, at least 1
    prompt_lengths   int64    [R]  tokens of each prompt, at least 0

Meta: a list of R `TrajectoryHeader`s, whose metrics are finite.

The bounds are checked once, where bytes arrive: a receiver must not trust what it gets, and its refusal comes back to
the sender, so an agent's fault is raised where it was made. Decoded columns are read-only views into the message, and
samples are made of them, and prompts repeated, only for who asks for samples.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, cycle
from operator import attrgetter
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np

from asyncrl.api.trajectory import SampleColumns, SharedPrompt, Trajectory
from asyncrl.comm.codec import (
    DEFAULT_MAX_BYTES,
    Array,
    CodecError,
    Column,
    Frame,
    Header,
    decode_as,
    decode_typed,
    encode_joined,
)

KIND = "trajectories"
MAX_ID_LENGTH = 256
_DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(np.int32) for name in ("prompts", "tokens", "versions")},
    **{name: np.dtype(np.int64) for name in ("lengths", "sizes", "prompt_lengths")},
    **{name: np.dtype(np.uint8) for name in ("loss_mask", "truncated")},
    "behave_logprobs": np.dtype(np.float32),
    "rewards": np.dtype(np.float64),
}
_BY_TOKEN = ("tokens", "loss_mask", "behave_logprobs", "versions")
_TOKEN_DTYPES = [_DTYPES[name] for name in _BY_TOKEN]
_token_arrays = attrgetter(*_BY_TOKEN)
_NO_PROMPT: Array = np.empty(0, np.int32)
_BYTES_PER_TOKEN = sum(dtype.itemsize for dtype in _TOKEN_DTYPES)
_Id: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_LENGTH)]


class TrajectoryHeader(msgspec.Struct, frozen=True):
    """What the header says of a trajectory."""

    rollout_id: _Id
    prompt_id: _Id
    order: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    metrics: dict[str, float]


_encode = msgspec.msgpack.Encoder().encode
_ENTRY = msgspec.msgpack.Decoder(TrajectoryHeader)
_HEADER = msgspec.msgpack.Decoder(Header[list[msgspec.Raw]])  # raw, so that a faulty entry refuses itself alone


@dataclass(slots=True, eq=False)
class Prepared:
    """A trajectory ready to be joined with others: its samples' arrays in the dtypes of the wire."""

    entry: msgspec.Raw
    prompt: Array
    parts: list[Array]
    """tokens, loss_mask, behave_logprobs, versions of a sample after the prompt, then those of the next."""
    lengths: list[int]
    rewards: list[float]
    truncated: list[bool] | list[int]
    nbytes: int


def prepare(trajectory: Trajectory) -> Prepared:
    """The part of encoding that can fail for one trajectory; copies no more than a look at the prompt takes.

    Raises:
        CodecError: it has no samples, a field is not plain data, or an array cannot take the dtype of the wire.
    """
    samples = trajectory.samples
    if not samples:
        raise CodecError(f"trajectory {trajectory.rollout_id!r} has no samples: a rejected rollout is not sent")
    entry = _encode_entry(trajectory)
    prompt = _NO_PROMPT
    if isinstance(samples, SharedPrompt):
        prompt, samples = samples.prompt, samples.rest
        prompt = prompt if prompt.dtype == _DTYPES["prompts"] else _convert("prompts", prompt)
    if isinstance(samples, SampleColumns):
        parts = [*_token_arrays(samples)]
        lengths, rewards, truncated = samples.lengths.tolist(), samples.rewards.tolist(), samples.truncated.tolist()
    else:
        parts, lengths, rewards, truncated = [], [], [], []
        for sample in samples:
            parts += _token_arrays(sample)
            lengths.append(len(sample.tokens))
            rewards.append(float(sample.reward))
            truncated.append(bool(sample.truncated))
    if [part.dtype for part in parts] != _TOKEN_DTYPES * (len(parts) // len(_TOKEN_DTYPES)):
        parts = [_convert(name, part) for name, part in zip(cycle(_BY_TOKEN), parts, strict=False)]
    if not isinstance(samples, SampleColumns) and (shared := _shared_prompt(parts)):
        prompt = parts[0][:shared]
        parts = [part[shared:] for part in parts]
        lengths = [length - shared for length in lengths]
    if not all(map(math.isfinite, rewards)):
        raise CodecError(f"trajectory.rewards is {rewards!r:.80}: use finite numbers")
    nbytes = prompt.nbytes + _BYTES_PER_TOKEN * sum(lengths)
    return Prepared(entry, prompt, parts, lengths, rewards, truncated, nbytes)


def _shared_prompt(parts: Sequence[Array]) -> int:
    """The number of tokens that all samples begin with and that no policy generated; `parts` as in `Prepared`.

    Bytes are compared, which takes a third of the time of comparing arrays and tells -0.0 from 0.0.
    """
    tokens, mask = parts[:2]
    if mask[0]:
        return 0
    length = int(mask.argmax()) or len(mask)
    expected = [tokens[:length].tobytes(), bytes(length), bytes(4 * length), b"\xff" * (4 * length)]
    for position, part in enumerate(parts):
        own, shared = part[:length].tobytes(), expected[position % len(expected)]
        if own != shared:
            both = min(len(own), len(shared))
            differ = np.frombuffer(own, np.uint8, both) != np.frombuffer(shared, np.uint8, both)
            length = (int(differ.argmax()) if differ.any() else both) // part.itemsize
            if not length:
                return 0
            expected = [each[: length * dtype.itemsize] for each, dtype in zip(expected, _TOKEN_DTYPES, strict=True)]
    return length


def encode_prepared(prepared: Sequence[Prepared], *, max_bytes: int = DEFAULT_MAX_BYTES) -> list[Frame]:
    """The two frames of these trajectories, at least one.

    Raises:
        CodecError: they are larger than `max_bytes`.
    """
    parts = [*chain.from_iterable([each.parts for each in prepared])]
    lengths = [*chain.from_iterable([each.lengths for each in prepared])]
    rewards = chain.from_iterable([each.rewards for each in prepared])
    truncated = chain.from_iterable([each.truncated for each in prepared])
    prompts = [each.prompt for each in prepared]
    sizes, prompt_lengths = [len(each.lengths) for each in prepared], [*map(len, prompts)]
    columns: list[tuple[str, int, Sequence[Any]]] = [
        ("prompts", sum(prompt_lengths), prompts),
        *((name, sum(lengths), parts[i :: len(_BY_TOKEN)]) for i, name in enumerate(_BY_TOKEN)),
        ("lengths", len(lengths), [struct.pack(f"<{len(lengths)}q", *lengths)]),
        ("rewards", len(lengths), [struct.pack(f"<{len(lengths)}d", *rewards)]),
        ("truncated", len(lengths), [bytes(truncated)]),
        ("sizes", len(sizes), [struct.pack(f"<{len(sizes)}q", *sizes)]),
        ("prompt_lengths", len(sizes), [struct.pack(f"<{len(sizes)}q", *prompt_lengths)]),
    ]
    joined = {name: Column(_DTYPES[name], (length,), parts) for name, length, parts in columns}
    return encode_joined(KIND, [each.entry for each in prepared], joined, max_bytes=max_bytes)


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
    header, arrays = decode_as(_HEADER, frames, max_bytes=max_bytes)
    if header.kind != KIND:
        raise CodecError(f"message is of kind {header.kind!r:.80}, expected {KIND!r}")
    if arrays.keys() != _DTYPES.keys():
        raise CodecError(f"trajectories have the arrays {[*arrays]!r:.200}, expected {', '.join(_DTYPES)}")
    sizes = _counts(arrays, "sizes", len(header.meta), least=1)
    prompt_lengths = _counts(arrays, "prompt_lengths", len(header.meta), least=0)
    lengths = _counts(arrays, "lengths", sum(sizes), least=0)
    prompts = _array(arrays, "prompts", sum(prompt_lengths))
    columns = [_array(arrays, name, sum(lengths)) for name in _BY_TOKEN]
    by_sample = [_array(arrays, name, len(lengths)) for name in ("lengths", "rewards", "truncated")]
    sound = _fault(prompts, SampleColumns(*columns, *by_sample)) is None  # only if that finds a fault, look at each
    token_ends = list(accumulate(lengths))
    decoded: list[Trajectory | CodecError] = []
    end = last = prompt_end = 0
    for raw, size, prompt_length in zip(header.meta, sizes, prompt_lengths, strict=True):
        start, end = end, end + size
        first, last = last, token_ends[end - 1]
        prompt_start, prompt_end = prompt_end, prompt_end + prompt_length
        prompt = prompts[prompt_start:prompt_end]
        rest = SampleColumns(*(array[first:last] for array in columns), *(array[start:end] for array in by_sample))
        try:
            entry = decode_typed(_ENTRY, raw, "trajectory's entry")
            if not sound and (fault := _fault(prompt, rest)) is not None:
                raise CodecError(fault)
            if not all(map(math.isfinite, entry.metrics.values())):
                raise CodecError(f"trajectory.metrics is {entry.metrics!r:.80}: use finite numbers")
            if not prompt_length and 0 in lengths[start:end]:
                raise CodecError("trajectory.lengths has 0 where there is no prompt: a sample has at least one token")
        except CodecError as error:
            decoded.append(error)
            continue
        samples = SharedPrompt(prompt, rest) if prompt_length else rest
        decoded.append(Trajectory(entry.rollout_id, entry.prompt_id, entry.order, samples, entry.metrics))
    return decoded


def _encode_entry(trajectory: Trajectory) -> msgspec.Raw:
    metrics = {name: float(value) for name, value in trajectory.metrics.items()}
    entry = TrajectoryHeader(trajectory.rollout_id, trajectory.prompt_id, trajectory.order, metrics)
    try:
        return msgspec.Raw(_encode(entry))
    except (TypeError, OverflowError) as error:
        raise CodecError(f"trajectory {entry!r:.400} cannot be sent: {error}") from error


def _counts(arrays: dict[str, Array], name: str, length: int, *, least: int) -> list[int]:
    """Such an array as a list."""
    counts: list[int] = _array(arrays, name, length).tolist()
    if not counts or min(counts) < least:
        raise CodecError(f"trajectory.{name} is {counts!r:.80}: use integers of at least {least}")
    return counts


def _array(arrays: dict[str, Array], name: str, length: int) -> Array:
    """Such an array, of its dtype and this length."""
    array, dtype = arrays[name], _DTYPES[name]
    if array.dtype != dtype or array.shape != (length,):
        raise CodecError(f"trajectory.{name} is {array.dtype} {array.shape}, expected {dtype} ({length},)")
    return array


def _convert(name: str, part: Array) -> Array:
    """`part` in the dtype of the wire; floats are rounded, everything else must keep its value."""
    dtype = _DTYPES[name]
    converted: Array = part.astype(dtype)
    if np.can_cast(part.dtype, dtype, "same_kind") and (dtype.kind == "f" or np.array_equal(part, converted)):
        return converted
    raise CodecError(f"trajectory.{name} has dtype {part.dtype} and values {dtype} cannot hold: build it as {dtype}")


def _fault(prompt: Array, samples: SampleColumns) -> str | None:
    """What is out of bounds in this prompt and what follows it; None if nothing is."""
    for name, tokens in (("prompts", prompt), ("tokens", samples.tokens)):
        if (low := np.minimum.reduce(tokens, initial=0)) < 0:
            return f"trajectory.{name} has {low}: token ids are at least 0"
    if (high := np.maximum.reduce(samples.loss_mask, initial=0)) > 1:
        return f"trajectory.loss_mask has {high}: use 0 or 1"
    if not np.isfinite(samples.behave_logprobs).all():
        return "trajectory.behave_logprobs holds a NaN or an infinity"
    if (low := np.minimum.reduce(samples.versions, initial=0)) < -1:
        return f"trajectory.versions has {low}: versions are at least 0, or -1 where nothing was generated"
    if not np.isfinite(samples.rewards).all():
        return f"trajectory.rewards is {samples.rewards.tolist()!r:.80}: use finite numbers"
    if (high := np.maximum.reduce(samples.truncated, initial=0)) > 1:
        return f"trajectory.truncated has {high}: use 0 or 1"
    return None
