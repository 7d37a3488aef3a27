"""Trajectories as messages: all arrays joined end to end, so that the cost follows tokens, not trajectories or samples.

One message carries one trajectory or many: what numpy and msgpack cost per call is paid once for all of them. For the
same reason everything is in columns, of which types and bounds are checked whole.

A trajectory's prompt, the longest run of tokens that all its samples begin with and that no policy generated (loss_mask
0, behave_logprobs 0, versions -1), is sent once and as tokens alone: 4 bytes a token in place of 13 in every sample.

Arrays; R are the trajectories of the message, S their samples, P the tokens of their prompts and T those that follow a
prompt, W those of T in trajectories whose turns were rewarded, B bytes, all in order:

    prompts          int32    [P]  at least 0
    tokens           int32    [T]  at least 0
    loss_mask        uint8    [T]  0 or 1
    behave_logprobs  float32  [T]  finite
    versions         int32    [T]  at least -1
    lengths          int64    [S]  tokens of each sample after the prompt, at least 0; at least 1 with the prompt's
    rewards          float64  [S]  finite
    truncated        uint8    [S]  0 or 1
    episodes         int32    [S]  at least 0
    token_rewards    float32  [W]  finite, and 0 where loss_mask is 0
    rewarded         uint8    [R]  0 or 1: whether the trajectory has token_rewards
    routing          uint8    [B]  of each trajectory whose header says its shape, experts by token, layer and place
                                   among the token's, little-endian: of its prompt, then of what follows
    routing_sizes    int64    [R]  bytes of each trajectory's routing, at least 0
    sizes            int64    [R]  samples of each trajectory, at least 1
    prompt_lengths   int64    [R]  tokens of each prompt, at least 0

Meta: a list of R `TrajectoryHeader`s, whose numbers are finite.

The bounds are checked once, where bytes arrive: a receiver must not trust what it gets, and its refusal comes back to
the sender, so an agent's fault is raised where it was made. Decoded columns are read-only views into the message, and
samples are made of them, and prompts repeated, only for who asks for samples.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, cycle
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np

from asyncrl.api.trajectory import SampleColumns, SharedPrompt, Trajectory, join_token_rewards, named_columns
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
    **{name: np.dtype(np.int32) for name in ("prompts", "tokens", "versions", "episodes")},
    **{name: np.dtype(np.int64) for name in ("lengths", "sizes", "prompt_lengths", "routing_sizes")},
    **{name: np.dtype(np.uint8) for name in ("loss_mask", "truncated", "rewarded", "routing")},
    **{name: np.dtype(np.float32) for name in ("behave_logprobs", "token_rewards")},
    "rewards": np.dtype(np.float64),
}
_BY_TOKEN = ("tokens", "loss_mask", "behave_logprobs", "versions")
MAX_ROUTED_LAYERS, MAX_ROUTED_EXPERTS = 1024, 64
"""Bounds of what a header says of a routing: layers, and experts of a token; no model comes near."""
_TOKEN_DTYPES = [_DTYPES[name] for name in _BY_TOKEN]
_ROUTING_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2")}
_token_arrays = attrgetter(*_BY_TOKEN)
_NO_PROMPT: Array = np.empty(0, np.int32)
_BYTES_PER_TOKEN = sum(dtype.itemsize for dtype in _TOKEN_DTYPES)
_Id: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_LENGTH)]
_Named: TypeAlias = dict[str, list[float | None]]


class RoutingHeader(msgspec.Struct, frozen=True):
    """The shape of a trajectory's routing; `width` bytes an expert's number."""

    layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROUTED_LAYERS)]
    per_token: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROUTED_EXPERTS)]
    width: Literal[1, 2]

    @property
    def nbytes(self) -> int:
        """Of one token."""
        return self.layers * self.per_token * self.width


class TrajectoryHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the header says of a trajectory; by name and sample its samples' reward parts and metrics, None for none."""

    rollout_id: _Id
    prompt_id: _Id
    order: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    metrics: dict[str, float]
    reward_parts: _Named = {}  # msgspec makes a new one for each header
    sample_metrics: _Named = {}
    routing: RoutingHeader | None = None


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
    episodes: list[int]
    token_rewards: Array | None
    """Of the tokens after the prompt, all samples' end to end."""
    routing: list[Array]
    """Of the prompt, then of what follows in each sample; empty where there is none."""
    nbytes: int


def prepare(trajectory: Trajectory) -> Prepared:
    """The part of encoding that can fail for one trajectory; copies no more than a look at the prompt takes.

    Raises:
        CodecError: it has no samples, a field is not plain data, or an array cannot take the dtype of the wire.
    """
    samples = trajectory.samples
    if not samples:
        raise CodecError(f"trajectory {trajectory.rollout_id!r} has no samples: a rejected rollout is not sent")
    prompt, prompt_routing = _NO_PROMPT, None
    if isinstance(samples, SharedPrompt):
        prompt, prompt_routing, samples = samples.prompt, samples.routing, samples.rest
        prompt = prompt if prompt.dtype == _DTYPES["prompts"] else _convert("prompts", prompt)
    if isinstance(samples, SampleColumns):
        parts = [*_token_arrays(samples)]
        lengths, rewards, truncated = samples.lengths.tolist(), samples.rewards.tolist(), samples.truncated.tolist()
        episodes, token_rewards = samples.episodes.tolist(), samples.token_rewards
        routing = [] if samples.routing is None else [samples.routing]
        named = samples.reward_parts, samples.metrics
    else:
        parts, lengths, rewards, truncated, episodes = [], [], [], [], []
        for sample in samples:
            parts += _token_arrays(sample)
            lengths.append(len(sample.tokens))
            rewards.append(float(sample.reward))
            truncated.append(bool(sample.truncated))
            episodes.append(sample.episode)
        token_rewards = join_token_rewards(samples)
        routing = [sample.routing for sample in samples if sample.routing is not None]
        if len(routing) != len(samples):
            routing = []
        named = (
            named_columns([sample.reward_parts for sample in samples]),
            named_columns([sample.metrics for sample in samples]),
        )
    if isinstance(trajectory.samples, SharedPrompt) and prompt_routing is None:
        routing = []
    header = _routing_header(routing)
    entry = _encode_entry(trajectory, *named, header)
    if [part.dtype for part in parts] != _TOKEN_DTYPES * (len(parts) // len(_TOKEN_DTYPES)):
        parts = [_convert(name, part) for name, part in zip(cycle(_BY_TOKEN), parts, strict=False)]
    if not isinstance(samples, SampleColumns) and (shared := _shared_routing(routing, _shared_prompt(parts))):
        prompt = parts[0][:shared]
        if routing:
            prompt_routing = routing[0][:shared]
            routing = [own[shared:] for own in routing]
        parts = [part[shared:] for part in parts]
        if token_rewards is not None:
            ends = np.cumsum(lengths)
            token_rewards = np.delete(token_rewards, _ranges(ends - lengths, shared))
        lengths = [length - shared for length in lengths]
    if not all(map(math.isfinite, rewards)):
        raise CodecError(f"trajectory.rewards is {rewards!r:.80}: use finite numbers")
    if header is not None and prompt_routing is not None:
        routing = [prompt_routing, *routing]
    routing = [np.ascontiguousarray(own).reshape(-1).view(np.uint8) for own in routing]
    nbytes = prompt.nbytes + _BYTES_PER_TOKEN * sum(lengths) + (0 if token_rewards is None else token_rewards.nbytes)
    nbytes += sum(own.nbytes for own in routing)
    return Prepared(entry, prompt, parts, lengths, rewards, truncated, episodes, token_rewards, routing, nbytes)


def _routing_header(routing: Sequence[Array]) -> RoutingHeader | None:
    """The shape of `routing`, one for all parts.

    Raises:
        CodecError: the parts are of different shapes, or of a type or a size that does not travel.
    """
    kinds = {(own.dtype, own.shape[1:]) for own in routing}
    if not kinds:
        return None
    dtype, shape = kinds.pop()
    if kinds or dtype not in _ROUTING_DTYPES.values():
        raise CodecError(f"trajectory.routing is {dtype} {shape}, and {kinds}: use uint8 or uint16, of one shape")
    layers, per_token = shape
    if not (1 <= layers <= MAX_ROUTED_LAYERS and 1 <= per_token <= MAX_ROUTED_EXPERTS):
        raise CodecError(
            f"trajectory.routing has {layers} layers and {per_token} experts a token: use 1 to {MAX_ROUTED_LAYERS}, "
            f"and 1 to {MAX_ROUTED_EXPERTS}"
        )
    return RoutingHeader(layers, per_token, 1 if dtype.itemsize == 1 else 2)


def _shared_routing(routing: Sequence[Array], shared: int) -> int:
    """The number of the `shared` tokens at the start of all samples that also went through the same experts."""
    for own in routing[1:]:
        same = (own[:shared] == routing[0][:shared]).all((1, 2))
        shared = shared if same.all() else int(same.argmin())
    return shared


def _ranges(starts: Array, length: int) -> Array:
    """The positions of runs of `length` from each of `starts`."""
    positions: Array = (starts[:, None] + np.arange(length)).ravel()
    return positions


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
    episodes = [*chain.from_iterable([each.episodes for each in prepared])]
    rewarded = [each.token_rewards is not None for each in prepared]
    token_rewards = [each.token_rewards for each in prepared if each.token_rewards is not None]
    prompts = [each.prompt for each in prepared]
    routing = [*chain.from_iterable([each.routing for each in prepared])]
    routing_sizes = [sum(map(len, each.routing)) for each in prepared]
    sizes, prompt_lengths = [len(each.lengths) for each in prepared], [*map(len, prompts)]
    columns: list[tuple[str, int, Sequence[Any]]] = [
        ("prompts", sum(prompt_lengths), prompts),
        *((name, sum(lengths), parts[i :: len(_BY_TOKEN)]) for i, name in enumerate(_BY_TOKEN)),
        ("lengths", len(lengths), [struct.pack(f"<{len(lengths)}q", *lengths)]),
        ("rewards", len(lengths), [struct.pack(f"<{len(lengths)}d", *rewards)]),
        ("truncated", len(lengths), [bytes(truncated)]),
        ("episodes", len(lengths), [struct.pack(f"<{len(lengths)}i", *episodes)]),
        ("token_rewards", sum(map(len, token_rewards)), token_rewards),
        ("rewarded", len(sizes), [bytes(rewarded)]),
        ("routing", sum(map(len, routing)), routing),
        ("routing_sizes", len(sizes), [struct.pack(f"<{len(sizes)}q", *routing_sizes)]),
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
        raise CodecError(f"trajectories have the arrays {[*arrays]!r:.400}, expected {', '.join(_DTYPES)}")
    sizes = _counts(arrays, "sizes", len(header.meta), least=1)
    prompt_lengths = _counts(arrays, "prompt_lengths", len(header.meta), least=0)
    lengths = _counts(arrays, "lengths", sum(sizes), least=0)
    prompts = _array(arrays, "prompts", sum(prompt_lengths))
    columns: list[Any] = [_array(arrays, name, sum(lengths)) for name in _BY_TOKEN]
    by_sample: list[Any] = [
        _array(arrays, name, len(lengths)) for name in ("lengths", "rewards", "truncated", "episodes")
    ]
    sound = _fault(prompts, SampleColumns(*columns, *by_sample)) is None  # only if that finds a fault, look at each
    token_ends = list(accumulate(lengths))
    token_rewards = _token_rewards(arrays, sizes, token_ends)
    routing_sizes = _counts(arrays, "routing_sizes", len(header.meta), least=0)
    routing = np.split(_array(arrays, "routing", sum(routing_sizes)), [*accumulate(routing_sizes)][:-1])
    decoded: list[Trajectory | CodecError] = []
    end = last = prompt_end = 0
    trajectories = zip(header.meta, sizes, prompt_lengths, token_rewards, routing, strict=True)
    for raw, size, prompt_length, own_rewards, own_routing in trajectories:
        start, end = end, end + size
        first, last = last, token_ends[end - 1]
        prompt_start, prompt_end = prompt_end, prompt_end + prompt_length
        prompt = prompts[prompt_start:prompt_end]
        rest = SampleColumns(*(array[first:last] for array in columns), *(array[start:end] for array in by_sample))
        try:
            entry = decode_typed(_ENTRY, raw, "trajectory's entry")
            routed = _routing(own_routing, entry.routing, prompt_length + last - first)
            if not sound and (fault := _fault(prompt, rest)) is not None:
                raise CodecError(fault)
            if not all(map(math.isfinite, entry.metrics.values())):
                raise CodecError(f"trajectory.metrics is {entry.metrics!r:.80}: use finite numbers")
            if own_rewards is not None or entry.reward_parts or entry.sample_metrics:
                rest = _with_more(rest, own_rewards, entry)
            if not prompt_length and 0 in lengths[start:end]:
                raise CodecError("trajectory.lengths has 0 where there is no prompt: a sample has at least one token")
            if routed is not None:
                rest = replace(rest, routing=routed[prompt_length:])
        except CodecError as error:
            decoded.append(error)
            continue
        of_prompt = None if routed is None else routed[:prompt_length]
        samples = SharedPrompt(prompt, rest, of_prompt) if prompt_length else rest
        decoded.append(Trajectory(entry.rollout_id, entry.prompt_id, entry.order, samples, entry.metrics))
    return decoded


def _token_rewards(arrays: dict[str, Array], sizes: Sequence[int], token_ends: Sequence[int]) -> list[Array | None]:
    """Each trajectory's part of the column, None where it has none; `token_ends` are those of the samples."""
    rewarded = _array(arrays, "rewarded", len(sizes))
    if (high := np.maximum.reduce(rewarded, initial=0)) > 1:
        raise CodecError(f"trajectory.rewarded has {high}: use 0 or 1")
    ends = [token_ends[end - 1] for end in accumulate(sizes)]
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    flags = rewarded.tolist()
    column = _array(arrays, "token_rewards", sum(length for length, flag in zip(lengths, flags, strict=True) if flag))
    parts: list[Array | None] = []
    end = 0
    for length, flag in zip(lengths, flags, strict=True):
        start, end = end, end + length if flag else end
        parts.append(column[start:end] if flag else None)
    return parts


def _routing(data: Array, header: RoutingHeader | None, tokens: int) -> Array | None:
    """A trajectory's routing `[tokens, layers, per_token]` of its bytes; None where there is none.

    Raises:
        CodecError: there are other bytes than its header says.
    """
    expected = 0 if header is None else tokens * header.nbytes
    if len(data) != expected:
        raise CodecError(
            f"trajectory.routing has {len(data)} bytes, its header {header} and {tokens} tokens tell of {expected}"
        )
    if header is None:
        return None
    routing: Array = data.view(_ROUTING_DTYPES[header.width]).reshape(tokens, header.layers, header.per_token)
    return routing


def _with_more(rest: SampleColumns, token_rewards: Array | None, entry: TrajectoryHeader) -> SampleColumns:
    """`rest` with what few trajectories have.

    Raises:
        CodecError: a value is out of bounds, or a list is not one for each sample.
    """
    if token_rewards is not None:
        if not np.isfinite(token_rewards).all():
            raise CodecError("trajectory.token_rewards holds a NaN or an infinity")
        if (token_rewards[rest.loss_mask == 0] != 0).any():
            raise CodecError("trajectory.token_rewards rewards a token that no policy generated")
    for name, columns in (("reward_parts", entry.reward_parts), ("sample_metrics", entry.sample_metrics)):
        for key, column in columns.items():
            if len(column) != len(rest):
                raise CodecError(f"trajectory.{name}[{key!r:.80}] has {len(column)} entries, of {len(rest)} samples")
            if not all(math.isfinite(number) for number in column if number is not None):
                raise CodecError(f"trajectory.{name}[{key!r:.80}] is {column!r:.80}: use finite numbers")
    reward_parts, metrics = (
        {name: np.array(column, np.float64) for name, column in columns.items()}  # None becomes NaN
        for columns in (entry.reward_parts, entry.sample_metrics)
    )
    return replace(rest, token_rewards=token_rewards, reward_parts=reward_parts, metrics=metrics)


def _encode_entry(
    trajectory: Trajectory,
    reward_parts: Mapping[str, Array],
    sample_metrics: Mapping[str, Array],
    routing: RoutingHeader | None,
) -> msgspec.Raw:
    metrics = {name: float(value) for name, value in trajectory.metrics.items()}
    parts, own = (
        {name: [None if math.isnan(number) else number for number in column.tolist()] for name, column in each.items()}
        for each in (reward_parts, sample_metrics)
    )
    entry = TrajectoryHeader(
        trajectory.rollout_id, trajectory.prompt_id, trajectory.order, metrics, parts, own, routing
    )
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
    if (low := np.minimum.reduce(samples.episodes, initial=0)) < 0:
        return f"trajectory.episodes has {low}: the members of a group are numbered from 0 on"
    return None
