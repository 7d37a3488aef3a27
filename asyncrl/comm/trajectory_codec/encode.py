"""Encode trajectories as frames: find the prompt that samples share, and refuse values that the wire format cannot
carry.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from asyncrl.api.picture import PlacedPicture
from asyncrl.api.trajectory import (
    MAX_GROUPS,
    Sample,
    SampleColumns,
    SharedPrompt,
    Trajectory,
    join_groups,
    join_pictures,
    join_token_columns,
    join_token_rewards,
    named_columns,
)
from asyncrl.comm.sockets import Frame
from asyncrl.comm.trajectory_codec.array_messages import (
    DEFAULT_MAX_BYTES,
    Array,
    CodecError,
    Column,
    encode_joined,
)
from asyncrl.comm.trajectory_codec.message_layout import (
    BY_TOKEN,
    DTYPES,
    KIND,
    MAX_ROUTED_EXPERTS,
    MAX_ROUTED_LAYERS,
    PAIRS,
    ROUTING_DTYPES,
    PicturesHeader,
    RoutingHeader,
    Span,
    TrajectoryHeader,
)

_TOKEN_DTYPES = [DTYPES[name] for name in BY_TOKEN]
_token_arrays = attrgetter(*BY_TOKEN)
_NO_PROMPT: Array = np.empty(0, np.int32)
_BYTES_PER_TOKEN = sum(dtype.itemsize for dtype in _TOKEN_DTYPES)
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True, eq=False)
class _Laid:
    """Samples laid out as on the wire, and the prompt that all of them begin with, if it is known."""

    parts: list[Array]
    """tokens, loss_mask, behave_logprobs, versions of a sample after the prompt, then the same of the next sample."""
    lengths: list[int]
    rewards: list[float]
    truncated: list[bool] | list[int]
    episodes: list[int]
    token_rewards: Array | None
    """Rewards of the tokens after the prompt, all samples concatenated."""
    token_columns: dict[str, Array]
    """The agent's own columns, concatenated in the same way."""
    pictures: tuple[tuple[PlacedPicture, ...], ...]
    groups: tuple[str, ...]
    routing: list[Array]
    """Expert choices of the tokens after the prompt, by sample; empty if there are none."""
    reward_parts: Mapping[str, Array]
    metrics: Mapping[str, Array]
    prompt: Array = field(default_factory=lambda: _NO_PROMPT)
    prompt_routing: Array | None = None
    prompt_pictures: tuple[PlacedPicture, ...] = ()

    def convert(self) -> None:
        """Convert tokens, masks, log-probabilities and versions to the dtypes of the wire format.

        Raises:
            CodecError: a dtype cannot hold a value.
        """
        if [part.dtype for part in self.parts] != _TOKEN_DTYPES * (len(self.parts) // len(_TOKEN_DTYPES)):
            self.parts = [_convert(name, part) for name, part in zip(cycle(BY_TOKEN), self.parts, strict=False)]

    def share_prompt(self) -> None:
        """Find the tokens that all samples begin with, and remove them from the samples."""
        shared = _shared_pictures(self.pictures, _shared_routing(self.routing, _shared_prompt(self.parts)))
        if not shared:
            return
        self.prompt = self.parts[0][:shared]
        if self.pictures:
            self.prompt_pictures = tuple(placed for placed in self.pictures[0] if placed.position < shared)
            own = len(self.prompt_pictures)
            self.pictures = tuple(tuple(placed.shifted(-shared) for placed in all_[own:]) for all_ in self.pictures)
        if self.routing:
            self.prompt_routing = self.routing[0][:shared]
            self.routing = [own[shared:] for own in self.routing]
        self.parts = [part[shared:] for part in self.parts]
        if self.token_rewards is not None or self.token_columns:
            of_prompt = _ranges(np.cumsum(self.lengths) - self.lengths, shared)
            rewards = self.token_rewards
            self.token_rewards = None if rewards is None else np.delete(rewards, of_prompt)
            self.token_columns = {name: np.delete(own, of_prompt) for name, own in self.token_columns.items()}
        self.lengths = [length - shared for length in self.lengths]


@dataclass(slots=True, eq=False)
class Prepared:
    """A trajectory ready to be joined with others."""

    entry: msgspec.Raw
    samples: _Laid
    """The samples, with arrays in the dtypes of the wire format."""
    routing: list[Array]
    """Bytes of the expert choices of the prompt, then of the rest of each sample; empty if there are none."""
    pictures: list[bytes]
    """The content of each picture, once."""
    groups: list[int]
    """Position of each sample's comparison group among the names of the entry; empty if there are no groups."""
    nbytes: int


def _laid_out(samples: Sequence[Sample]) -> _Laid:
    """Lay samples out. Only a `SharedPrompt` already knows the prompt that they share."""
    if isinstance(samples, SharedPrompt):
        laid = _of_columns(samples.rest)
        prompt = samples.prompt
        laid.prompt = prompt if prompt.dtype == DTYPES["prompts"] else _convert("prompts", prompt)
        laid.prompt_routing, laid.prompt_pictures = samples.routing, samples.pictures
        if samples.routing is None:
            laid.routing = []
        return laid
    return _of_columns(samples) if isinstance(samples, SampleColumns) else _of_samples(samples)


def _of_columns(samples: SampleColumns) -> _Laid:
    return _Laid(
        parts=[*_token_arrays(samples)],
        lengths=samples.lengths.tolist(),
        rewards=samples.rewards.tolist(),
        truncated=samples.truncated.tolist(),
        episodes=samples.episodes.tolist(),
        token_rewards=samples.token_rewards,
        token_columns=dict(samples.token_columns),
        pictures=samples.pictures,
        groups=samples.groups,
        routing=[] if samples.routing is None else [samples.routing],
        reward_parts=samples.reward_parts,
        metrics=samples.metrics,
    )


def _of_samples(samples: Sequence[Sample]) -> _Laid:
    routing = [sample.routing for sample in samples if sample.routing is not None]
    return _Laid(
        parts=[part for sample in samples for part in _token_arrays(sample)],
        lengths=[len(sample.tokens) for sample in samples],
        rewards=[float(sample.reward) for sample in samples],
        truncated=[bool(sample.truncated) for sample in samples],
        episodes=[sample.episode for sample in samples],
        token_rewards=join_token_rewards(samples),
        token_columns=join_token_columns(samples),
        pictures=join_pictures(samples),
        groups=join_groups(samples),
        routing=routing if len(routing) == len(samples) else [],
        reward_parts=named_columns([sample.reward_parts for sample in samples]),
        metrics=named_columns([sample.metrics for sample in samples]),
    )


def prepare(trajectory: Trajectory) -> Prepared:
    """Do the part of encoding that can fail for one trajectory. Little more than the shared prompt is copied.

    Raises:
        CodecError: it has no samples, a field is not plain data, or a value does not fit the dtype of the wire format.
    """
    samples = trajectory.samples
    if not samples:
        raise CodecError(f"trajectory {trajectory.rollout_id!r} has no samples: a rejected rollout is not sent")
    laid = _laid_out(samples)
    header = _routing_header(laid.routing)
    names = {name: number for number, name in enumerate(dict.fromkeys(laid.groups))}
    if len(names) > MAX_GROUPS:
        raise CodecError(
            f"trajectory {trajectory.rollout_id!r} has {len(names)} comparison groups, of {MAX_GROUPS} at most"
        )
    laid.convert()
    if not isinstance(samples, SampleColumns | SharedPrompt):
        laid.share_prompt()
    if not all(map(math.isfinite, laid.rewards)):
        raise CodecError(f"trajectory.rewards is {laid.rewards!r:.80}: use finite numbers")
    shown, contents = _pictures(laid.prompt_pictures, laid.pictures)
    entry = _encode_entry(
        trajectory, laid.reward_parts, laid.metrics, header, list(laid.token_columns), shown, list(names)
    )
    routing = laid.routing if laid.prompt_routing is None or header is None else [laid.prompt_routing, *laid.routing]
    routing = [np.ascontiguousarray(own).reshape(-1).view(np.uint8) for own in routing]
    by_token = [*routing, *laid.token_columns.values(), *(() if laid.token_rewards is None else (laid.token_rewards,))]
    nbytes = laid.prompt.nbytes + _BYTES_PER_TOKEN * sum(laid.lengths) + sum(own.nbytes for own in by_token)
    return Prepared(
        entry=entry,
        samples=laid,
        routing=routing,
        pictures=contents,
        groups=[names[name] for name in laid.groups],
        nbytes=nbytes + sum(map(len, contents)) + len(laid.groups),
    )


def _pictures(
    prompt: Sequence[PlacedPicture], samples: Sequence[Sequence[PlacedPicture]]
) -> tuple[PicturesHeader | None, list[bytes]]:
    """Return the header of a trajectory's pictures and each distinct content; None and no content without pictures."""
    contents: dict[str, bytes] = {}
    numbers: dict[str, int] = {}

    def span(placed: PlacedPicture) -> Span:
        sha256 = placed.picture.sha256
        contents[sha256] = placed.picture.data
        return placed.position, placed.length, numbers.setdefault(sha256, len(numbers))

    if not prompt and not any(samples):
        return None, []
    own = [[span(placed) for placed in each] for each in (prompt, *samples)]
    sizes = [(sha256, len(data)) for sha256, data in contents.items()]
    return PicturesHeader(sizes, own[0], own[1:] if any(own[1:]) else []), [*contents.values()]


def _shared_pictures(pictures: Sequence[Sequence[PlacedPicture]], shared: int) -> int:
    """Return the number of the `shared` first tokens that have the same complete pictures in all samples."""
    for number in range(max(map(len, pictures), default=0)):
        placed = {own[number] if number < len(own) else None for own in pictures}
        begins = min(each.position for each in placed if each is not None)
        if begins >= shared:
            break
        if len(placed) > 1 or any(each is not None and each.end > shared for each in placed):
            return begins
    return shared


def _routing_header(routing: Sequence[Array]) -> RoutingHeader | None:
    """Return the shape of `routing`, which is the same for all parts.

    Raises:
        CodecError: the parts differ in shape, or their type or size is not supported.
    """
    if not routing:
        return None
    kinds = {(own.dtype, own.shape[1:]) for own in routing}
    dtype, shape = kinds.pop()
    if kinds or dtype not in ROUTING_DTYPES.values():
        raise CodecError(f"trajectory.routing is {dtype} {shape}, and {kinds}: use uint8 or uint16, of one shape")
    layers, per_token = shape
    if not (1 <= layers <= MAX_ROUTED_LAYERS and 1 <= per_token <= MAX_ROUTED_EXPERTS):
        raise CodecError(
            f"trajectory.routing has {layers} layers and {per_token} experts a token: use 1 to {MAX_ROUTED_LAYERS}, "
            f"and 1 to {MAX_ROUTED_EXPERTS}"
        )
    return RoutingHeader(layers, per_token, 1 if dtype.itemsize == 1 else 2)


def _shared_routing(routing: Sequence[Array], shared: int) -> int:
    """Return the number of the `shared` first tokens that also went through the same experts in all samples."""
    for own in routing[1:]:
        same = (own[:shared] == routing[0][:shared]).all((1, 2))
        shared = shared if same.all() else int(same.argmin())
    return shared


def _ranges(starts: Array, length: int) -> Array:
    """Return the positions of a run of `length` from each of `starts`."""
    positions: Array = (starts[:, None] + np.arange(length)).ravel()
    return positions


def _shared_prompt(parts: Sequence[Array]) -> int:
    """Return the number of tokens that all samples begin with and that no policy generated; `parts` as in `_Laid`.

    It compares bytes, which takes a third of the time of comparing arrays and distinguishes -0.0 from 0.0.
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
    """Return the two frames of these trajectories, of which there is at least one.

    Raises:
        CodecError: the message is larger than `max_bytes`.
    """
    samples = [each.samples for each in prepared]
    parts = [*chain.from_iterable([each.parts for each in samples])]
    lengths = [*chain.from_iterable([each.lengths for each in samples])]
    rewards = chain.from_iterable([each.rewards for each in samples])
    truncated = chain.from_iterable([each.truncated for each in samples])
    episodes = [*chain.from_iterable([each.episodes for each in samples])]
    prompts = [each.prompt for each in samples]
    sizes, prompt_lengths = [len(each.lengths) for each in samples], [*map(len, prompts)]
    columns: list[tuple[str, int, Sequence[Any]]] = [
        ("prompts", sum(prompt_lengths), prompts),
        *((name, sum(lengths), parts[i :: len(BY_TOKEN)]) for i, name in enumerate(BY_TOKEN)),
        ("lengths", len(lengths), [struct.pack(f"<{len(lengths)}q", *lengths)]),
        ("rewards", len(lengths), [struct.pack(f"<{len(lengths)}d", *rewards)]),
        ("truncated", len(lengths), [bytes(truncated)]),
        ("episodes", len(lengths), [struct.pack(f"<{len(lengths)}i", *episodes)]),
        ("sizes", len(sizes), [struct.pack(f"<{len(sizes)}q", *sizes)]),
        ("prompt_lengths", len(sizes), [struct.pack(f"<{len(sizes)}q", *prompt_lengths)]),
        *_optional_columns(prepared),
    ]
    joined = {name: Column(DTYPES[name], (length,), parts) for name, length, parts in columns}
    return encode_joined(KIND, [each.entry for each in prepared], joined, max_bytes=max_bytes)


def _optional_columns(prepared: Sequence[Prepared]) -> Iterator[tuple[str, int, Sequence[Any]]]:
    """Yield name, length and parts of the optional columns, each followed by its sizes."""
    of_each: dict[str, list[Sequence[Any]]] = {
        "token_rewards": [
            () if each.samples.token_rewards is None else (each.samples.token_rewards,) for each in prepared
        ],
        "token_columns": [[*each.samples.token_columns.values()] for each in prepared],
        "groups": [[bytes(each.groups)] if each.groups else () for each in prepared],
        "routing": [each.routing for each in prepared],
        "pictures": [each.pictures for each in prepared],
    }
    for name, parts in of_each.items():
        if any(parts):
            sizes = [sum(map(len, own)) for own in parts]
            yield name, sum(sizes), [*chain.from_iterable(parts)]
            yield PAIRS[name], len(sizes), [struct.pack(f"<{len(sizes)}q", *sizes)]


def encode_trajectories(trajectories: Iterable[Trajectory], *, max_bytes: int = DEFAULT_MAX_BYTES) -> list[Frame]:
    """Return the two frames of these trajectories, of which there is at least one.

    Raises:
        CodecError: as `prepare` and `encode_prepared`.
    """
    return encode_prepared([prepare(trajectory) for trajectory in trajectories], max_bytes=max_bytes)


def _encode_entry(
    trajectory: Trajectory,
    reward_parts: Mapping[str, Array],
    sample_metrics: Mapping[str, Array],
    routing: RoutingHeader | None,
    token_columns: list[str],
    pictures: PicturesHeader | None,
    groups: list[str],
) -> msgspec.Raw:
    metrics = {name: float(value) for name, value in trajectory.metrics.items()}
    parts, own = (
        {name: [None if math.isnan(number) else number for number in column.tolist()] for name, column in each.items()}
        for each in (reward_parts, sample_metrics)
    )
    entry = TrajectoryHeader(
        trajectory.rollout_id,
        trajectory.prompt_id,
        trajectory.order,
        metrics,
        parts,
        own,
        routing,
        token_columns,
        pictures,
        groups,
    )
    try:
        return msgspec.Raw(_encode(entry))
    except (TypeError, OverflowError) as error:
        raise CodecError(f"trajectory {entry!r:.400} cannot be sent: {error}") from error


def _convert(name: str, part: Array) -> Array:
    """Return `part` in the dtype of the wire format. Floats are rounded; all other values must be kept exactly."""
    dtype = DTYPES[name]
    converted: Array = part.astype(dtype)
    if np.can_cast(part.dtype, dtype, "same_kind") and (dtype.kind == "f" or np.array_equal(part, converted)):
        return converted
    raise CodecError(f"trajectory.{name} has dtype {part.dtype} and values {dtype} cannot hold: build it as {dtype}")
