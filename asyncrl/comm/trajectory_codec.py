"""Trajectories as messages: on sockets, between ranks and in files. No pickle, one copy at the sender, none after it.

A message carries one or more trajectories in two frames, so that they share the cost of calls to numpy and msgpack:

    header    msgpack map of a `Header`: magic, protocol version, and a `TrajectoryHeader` for each trajectory
    payload   sizes    int64 [R, C]  number of entries of each column that belong to each of the R trajectories
              columns  the C columns of COLUMNS, in that order, each with the entries of all trajectories end to end

That is the only rule for arrays. A column that a trajectory does not need has size 0 for it, so an optional column
costs 8 bytes. The sizes follow from a trajectory's entry (`TrajectoryHeader.sizes`). They are sent all the same, so
that an invalid entry affects its own trajectory alone. The columns stand widest type first, which aligns them without
padding. One frame for all arrays costs a copy at the sender (a memcpy, about 10 GB/s) and saves libzmq at least one
system call per array: on plain sockets the rate is twice that of eight frames, at both 13 kB and 208 kB per message.

A trajectory's prompt is the longest run of tokens that all its samples begin with and that no policy generated
(loss_mask 0, behave_logprobs 0, versions -1). It is sent once, and only as tokens: 4 bytes per token instead of 13 in
every sample. Pictures that all samples begin with belong to the prompt; a prompt ends where pictures or experts differ,
and never within a picture.

The bounds are checked once, by the receiver, which must not trust its input: for any bytes it returns trajectories or
raises CodecError. The sender receives the refusal, so an agent's mistake is raised in its own process. Decoded columns
are read-only views into the message. Samples, with their prompts repeated, are built from them only on request.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, repeat
from operator import attrgetter, mul
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.api.picture import Picture, PlacedPicture, check_spans
from asyncrl.api.trajectory import (
    MAX_GROUP_LENGTH,
    MAX_GROUPS,
    Sample,
    SampleColumns,
    SharedPrompt,
    Trajectory,
    check_group,
    join_groups,
    join_pictures,
    named_columns,
)
from asyncrl.comm.sockets import Frame
from asyncrl.comm.typed import msgpack_decoder

Array: TypeAlias = NDArray[Any]

MAGIC: Final = "asyncrl"
PROTOCOL_VERSION: Final = 4
MAX_BYTES = 1 << 30
"""Limit of one message, header and payload together. A GiB is 80 million trajectory tokens."""
MAX_HEADER_BYTES = 64 << 20
MAX_ID_LENGTH = 256
MAX_ROUTED_LAYERS, MAX_ROUTED_EXPERTS = 1024, 64
"""Bounds of a routing in a header, layers and experts per token; far above any model."""


class CodecError(ValueError):
    """A message that cannot be encoded, or bytes that are not a valid message."""


class Column(NamedTuple):
    """An array of the payload: its type on the wire and the bounds of its values. Floats are finite. One with a number
    by sample is sent as numbers, and packed as `code` of `struct`.
    """

    dtype: np.dtype[Any]
    least: int | None = None
    most: int | None = None
    code: str = ""


_I8, _F8, _I4, _F4, _U1 = map(np.dtype, ("<i8", "<f8", "<i4", "<f4", "|u1"))
COLUMNS: dict[str, Column] = {
    "lengths": Column(_I8, 0, code="q"),  # tokens after the prompt; at least 1 with the prompt's
    "rewards": Column(_F8, code="d"),
    "prompts": Column(_I4, 0),
    "tokens": Column(_I4, 0),
    "versions": Column(_I4, -1),
    "behave_logprobs": Column(_F4),
    "token_rewards": Column(_F4),  # 0 where loss_mask is 0
    "token_columns": Column(_F4),  # end to end, each as token_rewards
    "episodes": Column(_I4, 0, code="i"),
    "routing": Column(_U1),  # of the prompt, then of the rest
    "loss_mask": Column(_U1, None, 1),
    "truncated": Column(_U1, None, 1, "B"),
    "groups": Column(_U1, code="B"),  # position among the entry's names
    "pictures": Column(_U1),  # content of each picture, once
}
"""`TrajectoryHeader.sizes`, `prepare` and `_trajectory` keep this order."""
_ITEM_SIZES = [column.dtype.itemsize for column in COLUMNS.values()]
_BY_TOKEN = ("tokens", "loss_mask", "behave_logprobs", "versions")
_by_token = attrgetter(*_BY_TOKEN)
_TOKEN_DTYPES = [COLUMNS[name].dtype for name in _BY_TOKEN]
_BY_SAMPLE = ("lengths", "rewards", "truncated", "episodes")
_ROUTING_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("|u1"), 2: np.dtype("<u2")}

_Id: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_LENGTH)]
_Group: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_GROUP_LENGTH)]
_Named: TypeAlias = dict[str, list[float | None]]
_NotNegative: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Span: TypeAlias = tuple[_NotNegative, Annotated[int, msgspec.Meta(ge=1)], _NotNegative]
"""A picture in a prompt or a sample's rest: position and length of its span, and its number in `contents`."""


class RoutingHeader(msgspec.Struct, frozen=True):
    """Shape of a trajectory's routing; `width` is the number of bytes of an expert's index."""

    layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROUTED_LAYERS)]
    per_token: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROUTED_EXPERTS)]
    width: Literal[1, 2]


class PicturesHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """The pictures of a trajectory; the bytes of `contents` follow one another in its column."""

    contents: list[tuple[str, _NotNegative]]
    """SHA-256 and size in bytes of each picture, once."""
    prompt: list[Span] = []
    samples: list[list[Span]] = []
    """Spans of each sample, at positions after the prompt; empty if all are the prompt's."""


class TrajectoryHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """A trajectory's entry in the header. Reward parts and metrics are lists by name with one value per sample, None if
    absent; numbers are finite.
    """

    rollout_id: _Id
    prompt_id: _Id
    order: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    metrics: dict[str, float]
    reward_parts: _Named = {}  # msgspec makes a new one for each header
    sample_metrics: _Named = {}
    token_rewards: bool = False
    token_columns: list[str] = []
    """Names of the token columns, in their order in the payload."""
    routing: RoutingHeader | None = None
    pictures: PicturesHeader | None = None
    groups: Annotated[list[_Group], msgspec.Meta(max_length=MAX_GROUPS)] = []
    """Names of the comparison groups."""

    def sizes(self, prompt: int, tokens: int, samples: int) -> list[int]:
        """Return the number of entries in each of COLUMNS; `tokens` are those of all samples after the prompt."""
        routing, pictures = self.routing, self.pictures
        return [
            samples,  # lengths
            samples,  # rewards
            prompt,  # prompts
            tokens,  # tokens
            tokens,  # versions
            tokens,  # behave_logprobs
            tokens if self.token_rewards else 0,
            tokens * len(self.token_columns),
            samples,  # episodes
            0 if routing is None else (prompt + tokens) * routing.layers * routing.per_token * routing.width,
            tokens,  # loss_mask
            samples,  # truncated
            samples if self.groups else 0,
            0 if pictures is None else sum(size for _, size in pictures.contents),
        ]


class Header(msgspec.Struct, frozen=True):
    """The first frame of a message. Its entries are raw, so that an invalid one affects only its own trajectory."""

    magic: Literal["asyncrl"]
    protocol: Literal[4]
    trajectories: Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1)]


M = TypeVar("M")
_HEADER, _ENTRY = msgpack_decoder(Header), msgpack_decoder(TrajectoryHeader)
_encode = msgspec.msgpack.Encoder().encode


# The sender


@dataclass(slots=True, eq=False)
class Prepared:
    """A trajectory ready to be joined with others: its entry, and the parts or numbers and the size of each of its
    columns.
    """

    entry: msgspec.Raw
    parts: list[Sequence[Any]]
    sizes: list[int]
    nbytes: int
    """Of all columns."""


def prepare(trajectory: Trajectory) -> Prepared:
    """Do the part of encoding that can fail for one trajectory. Little more than the shared prompt is copied.

    Raises:
        CodecError: it has no samples, a field is not plain data, or a value does not fit the dtype of the wire format.
    """
    samples = trajectory.samples
    if not samples:
        raise CodecError(f"trajectory {trajectory.rollout_id!r} has no samples: a rejected rollout is not sent")
    whole = samples if isinstance(samples, SharedPrompt) else None
    columns = whole.rest if whole is not None else samples if isinstance(samples, SampleColumns) else None
    runs: Sequence[Sample | SampleColumns] = samples if columns is None else [columns]
    names = [*dict.fromkeys(chain.from_iterable([run.token_columns for run in runs]))]
    parts = _parts(runs, names)
    prompt_pictures: Sequence[PlacedPicture] = ()
    prompt: Sequence[Array] = ()
    if columns is not None:
        pictures, groups = columns.pictures, columns.groups
        reward_parts, metrics = columns.reward_parts, columns.metrics
        lengths, rewards, truncated, episodes = [
            _convert(name, getattr(columns, name), COLUMNS[name].dtype).tolist() for name in _BY_SAMPLE
        ]
        if whole is not None:
            prompt, prompt_pictures = [_convert("prompts", whole.prompt, _I4)], whole.pictures
            parts["routing"] = (
                [whole.routing, *parts["routing"]] if whole.routing is not None and parts["routing"] else ()
            )
    else:
        pictures, groups = join_pictures(samples), join_groups(samples)
        reward_parts = named_columns([sample.reward_parts for sample in samples])
        metrics = named_columns([sample.metrics for sample in samples])
        if shared := _shared_prompt(parts, pictures):
            prompt, prompt_routing = [parts["tokens"][0][:shared]], [each[:shared] for each in parts["routing"][:1]]
            parts = {name: [part[shared:] for part in each] for name, each in parts.items()}
            parts["routing"] = [*prompt_routing, *parts["routing"]]
            prompt_pictures = [placed for each in pictures[:1] for placed in each if placed.position < shared]
            own = len(prompt_pictures)
            pictures = tuple(tuple(placed.shifted(-shared) for placed in each[own:]) for each in pictures)
        lengths = [*map(len, parts["tokens"])]
        rewards = [float(sample.reward) for sample in samples]
        truncated = [bool(sample.truncated) for sample in samples]
        episodes = [sample.episode for sample in samples]
    if not all(map(math.isfinite, rewards)):
        raise CodecError(f"trajectory.rewards is {rewards!r:.80}: use finite numbers")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    if len(numbers) > MAX_GROUPS:
        raise CodecError(
            f"trajectory {trajectory.rollout_id!r} has {len(numbers)} comparison groups, of {MAX_GROUPS} at most"
        )
    spans, contents = _pictures_header(prompt_pictures, pictures)
    entry = TrajectoryHeader(
        trajectory.rollout_id,
        trajectory.prompt_id,
        trajectory.order,
        {name: float(value) for name, value in trajectory.metrics.items()},
        _named_lists(reward_parts),
        _named_lists(metrics),
        bool(parts["token_rewards"]),
        names,
        _routing_header(parts["routing"]),
        spans,
        [*numbers],
    )
    try:
        raw = msgspec.Raw(_encode(entry))
    except (TypeError, OverflowError) as error:
        raise CodecError(f"trajectory {entry!r:.400} cannot be sent: {error}") from error
    in_order = [
        lengths,
        rewards,
        prompt,
        parts["tokens"],
        parts["versions"],
        parts["behave_logprobs"],
        parts["token_rewards"],
        parts["token_columns"],
        episodes,
        parts["routing"],
        parts["loss_mask"],
        truncated,
        [numbers[name] for name in groups],
        contents,
    ]
    sizes = entry.sizes(sum(map(len, prompt)), sum(lengths), len(lengths))
    return Prepared(raw, in_order, sizes, sum(map(mul, sizes, _ITEM_SIZES)))


def _parts(runs: Sequence[Sample | SampleColumns], names: Sequence[str]) -> dict[str, Sequence[Array]]:
    """Return the columns by token, each with a part for every one of `runs`; `names` are those of the token columns."""
    by_token = [*chain.from_iterable(map(_by_token, runs))]
    if [part.dtype for part in by_token] != _TOKEN_DTYPES * len(runs):
        columns = zip(cycle(_BY_TOKEN), by_token, cycle(_TOKEN_DTYPES), strict=False)
        by_token = [_convert(name, part, dtype) for name, part, dtype in columns]
    parts: dict[str, Sequence[Array]] = {name: by_token[i :: len(_BY_TOKEN)] for i, name in enumerate(_BY_TOKEN)}
    rewards, routing = [run.token_rewards for run in runs], [run.routing for run in runs if run.routing is not None]
    own: Sequence[Array] = ()
    named: Sequence[Array] = ()
    if names or any([each is not None for each in rewards]):
        zeros = [np.zeros(len(run.tokens), _F4) for run in runs]
        if any([each is not None for each in rewards]):
            own = [zero if each is None else each for each, zero in zip(rewards, zeros, strict=True)]
        named = [run.token_columns.get(name, zero) for name in names for run, zero in zip(runs, zeros, strict=True)]
    parts["token_rewards"] = [_convert("token_rewards", part, _F4) for part in own]
    parts["token_columns"] = [_convert("token_columns", part, _F4) for part in named]
    parts["routing"] = routing if len(routing) == len(runs) else []
    return parts


def _convert(name: str, part: Array, dtype: np.dtype[Any]) -> Array:
    """Return `part` in the dtype of its column. Floats are rounded; all other values must be kept exactly."""
    if part.dtype == dtype:
        return part
    converted: Array = part.astype(dtype)
    if np.can_cast(part.dtype, dtype, "same_kind") and (dtype.kind == "f" or np.array_equal(part, converted)):
        return converted
    raise CodecError(f"trajectory.{name} has dtype {part.dtype} and values {dtype} cannot hold: build it as {dtype}")


def _shared_prompt(parts: Mapping[str, Sequence[Array]], pictures: Sequence[Sequence[PlacedPicture]]) -> int:
    """Return the number of tokens that all samples begin with, with the same experts and complete pictures."""
    shared = _shared_tokens(parts)
    for own in parts["routing"][1:]:
        same = (own[:shared] == parts["routing"][0][:shared]).all((1, 2))
        shared = shared if same.all() else int(same.argmin())
    return _shared_pictures(pictures, shared)


def _shared_tokens(parts: Mapping[str, Sequence[Array]]) -> int:
    """Return the number of tokens that all samples begin with and that no policy generated.

    It compares bytes, which takes a third of the time of comparing arrays and distinguishes -0.0 from 0.0.
    """
    tokens, mask = parts["tokens"][0], parts["loss_mask"][0]
    if mask[0]:
        return 0
    length = int(mask.argmax()) or len(mask)
    prompts = (tokens[:length].tobytes(), bytes(length), bytes(4 * length), b"\xff" * (4 * length))
    for name, prompt in zip(_BY_TOKEN, prompts, strict=True):
        expected = prompt[: length * COLUMNS[name].dtype.itemsize]
        for part in parts[name]:
            if (own := part[:length].tobytes()) != expected:
                both = min(len(own), len(expected))
                differ = np.frombuffer(own, np.uint8, both) != np.frombuffer(expected, np.uint8, both)
                length = (int(differ.argmax()) if differ.any() else both) // part.itemsize
                if not length:
                    return 0
                expected = expected[: length * part.itemsize]
    return length


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


def _pictures_header(
    prompt: Sequence[PlacedPicture], samples: Sequence[Sequence[PlacedPicture]]
) -> tuple[PicturesHeader | None, list[bytes]]:
    """Return the header of a trajectory's pictures and each distinct content; None and no content without pictures."""
    if not prompt and not any(samples):
        return None, []
    contents: dict[str, bytes] = {}
    numbers: dict[str, int] = {}

    def span(placed: PlacedPicture) -> Span:
        sha256 = placed.picture.sha256
        contents[sha256] = placed.picture.data
        return placed.position, placed.length, numbers.setdefault(sha256, len(numbers))

    own = [[span(placed) for placed in each] for each in (prompt, *samples)]
    sizes = [(sha256, len(data)) for sha256, data in contents.items()]
    return PicturesHeader(sizes, own[0], own[1:] if any(own[1:]) else []), [*contents.values()]


def _routing_header(routing: Sequence[Array]) -> RoutingHeader | None:
    """Return the shape of `routing`, which is the same for all parts."""
    if not routing:
        return None
    kinds = {(own.dtype, own.shape[1:]) for own in routing}
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


def _named_lists(columns: Mapping[str, Array]) -> _Named:
    return {
        name: [None if math.isnan(number) else number for number in column.tolist()] for name, column in columns.items()
    }


def encode_prepared(prepared: Sequence[Prepared]) -> list[Frame]:
    """Return the two frames of these trajectories, of which there is at least one.

    Raises:
        CodecError: the message is larger than MAX_BYTES.
    """
    header = _encode(Header(MAGIC, PROTOCOL_VERSION, [each.entry for each in prepared]))
    if len(header) > MAX_HEADER_BYTES:
        raise CodecError(f"header of {len(prepared)} trajectories takes {len(header)} bytes, over {MAX_HEADER_BYTES}")
    sizes = [*chain.from_iterable([each.sizes for each in prepared])]
    nbytes = len(header) + _I8.itemsize * len(sizes) + sum(each.nbytes for each in prepared)
    if nbytes > MAX_BYTES:
        raise CodecError(f"message of {len(prepared)} trajectories takes {nbytes} bytes, limit {MAX_BYTES}: split it")
    parts: list[Any] = [struct.pack(f"<{len(sizes)}q", *sizes)]
    for column, of_each in zip(COLUMNS.values(), zip(*[each.parts for each in prepared], strict=True), strict=True):
        own = [*chain.from_iterable(of_each)]
        parts += [struct.pack(f"<{len(own)}{column.code}", *own)] if column.code else own
    try:
        return [header, b"".join(parts)]  # takes a third of the time of `np.concatenate`
    except (TypeError, BufferError):  # a part is a view with gaps
        return [header, b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts)]


def encode_trajectories(trajectories: Iterable[Trajectory]) -> list[Frame]:
    """Return the two frames of these trajectories, of which there is at least one.

    Raises:
        CodecError: as `prepare` and `encode_prepared`.
    """
    return encode_prepared([prepare(trajectory) for trajectory in trajectories])


# The receiver


def decode_trajectories(frames: Sequence[Frame]) -> list[Trajectory]:
    """Return the trajectories in `frames`.

    Raises:
        CodecError: the frames are malformed or larger than MAX_BYTES, or a value is out of its bounds.
    """
    decoded = decode_each(frames)
    for trajectory in decoded:
        if isinstance(trajectory, CodecError):
            raise trajectory
    return [trajectory for trajectory in decoded if isinstance(trajectory, Trajectory)]


def decode_each(frames: Sequence[Frame], *, max_bytes: int = MAX_BYTES) -> list[Trajectory | CodecError]:
    """Return each trajectory in `frames`, or the error in it.

    Raises:
        CodecError: the frames are malformed or larger than `max_bytes` as a whole.
    """
    entries, sizes, columns = _split(frames, max_bytes)
    sound = _fault(columns) is None  # check each trajectory only if this finds a fault
    ends = np.cumsum(sizes, axis=0)
    bounds = zip(columns, (ends - sizes).T.tolist(), ends.T.tolist(), strict=True)
    by_column = [
        [column[first:last] for first, last in zip(starts, ends, strict=True)] if len(column) else repeat(column)
        for column, starts, ends in bounds
    ]
    decoded: list[Trajectory | CodecError] = []
    for raw, size, *own in zip(entries, sizes.tolist(), *by_column, strict=False):
        try:
            if not sound and (fault := _fault(own)) is not None:
                raise CodecError(fault)
            decoded.append(_trajectory(decode_typed(_ENTRY, raw, "trajectory's entry"), size, own))
        except CodecError as error:
            decoded.append(error)
    return decoded


def decode_typed(decoder: msgspec.msgpack.Decoder[M], data: Frame | msgspec.Raw, what: str) -> M:
    """Decode `data` as the decoder's type.

    Raises:
        CodecError: `data` is not of that type. The message names it as `what`, with the wrong field (`$` is the whole)
            and the expected type.
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"{what}: {error}") from error


def _split(frames: Sequence[Frame], max_bytes: int) -> tuple[list[msgspec.Raw], Array, list[Array]]:
    """Return the undecoded entries of the R trajectories, the sizes `[R, C]`, and the C columns."""
    if len(frames) != 2:
        raise CodecError(f"a message has 2 frames, got {len(frames)}")
    header, payload = memoryview(frames[0]), memoryview(frames[1]).toreadonly()
    if header.nbytes + payload.nbytes > max_bytes or header.nbytes > MAX_HEADER_BYTES:
        raise CodecError(f"message of {header.nbytes} + {payload.nbytes} bytes is over the limit of {max_bytes}")
    entries = decode_typed(_HEADER, header, f"header of protocol version {PROTOCOL_VERSION}").trajectories
    count = len(entries) * len(COLUMNS)
    offset = count * _I8.itemsize
    if payload.nbytes < offset:
        raise CodecError(f"payload has {payload.nbytes} bytes, the sizes of {len(entries)} trajectories take {offset}")
    sizes = np.frombuffer(payload, _I8, count).reshape(len(entries), len(COLUMNS))
    if sizes.min() < 0 or sizes.max() > payload.nbytes:  # so that their sums do not overflow
        raise CodecError(f"payload has {payload.nbytes} bytes, a column's sizes are {sizes.min()} to {sizes.max()}")
    totals: list[int] = np.add.reduce(sizes).tolist()
    expected = offset + sum(map(mul, totals, _ITEM_SIZES))
    if payload.nbytes != expected:
        raise CodecError(f"payload has {payload.nbytes} bytes, its columns take {expected}")
    columns: list[Array] = []
    for column, total in zip(COLUMNS.values(), totals, strict=True):
        columns.append(np.frombuffer(payload, column.dtype, total, offset) if total else np.empty(0, column.dtype))
        offset += columns[-1].nbytes
    return entries, sizes, columns


def _fault(columns: Sequence[Array]) -> str | None:
    """Describe a value that is out of its column's bounds; None if all are in bounds."""
    for (name, (dtype, least, most, _)), values in zip(COLUMNS.items(), columns, strict=True):
        if not len(values):
            continue
        if dtype.kind == "f" and not np.isfinite(values).all():
            return f"trajectory.{name} holds a NaN or an infinity: use finite numbers"
        if least is not None and (low := np.minimum.reduce(values, initial=least)) < least:
            return f"trajectory.{name} has {low}: use integers of at least {least}"
        if most is not None and (high := np.maximum.reduce(values, initial=most)) > most:
            return f"trajectory.{name} has {high}: use integers of at most {most}"
    return None


def _trajectory(entry: TrajectoryHeader, sizes: list[int], columns: Sequence[Array]) -> Trajectory:
    """Return the trajectory of `entry` from its part of the columns, whose values are in bounds."""
    lengths, rewards, prompt, tokens, versions, logprobs, token_rewards, *others = columns
    token_columns, episodes, experts, mask, truncated, groups, contents = others
    samples, by_sample = len(lengths), lengths.tolist()
    expected = entry.sizes(len(prompt), sum(by_sample), samples)
    if sizes != expected:
        name, size, right = next(each for each in zip(COLUMNS, sizes, expected, strict=True) if each[1] != each[2])
        raise CodecError(
            f"trajectory.{name} has {size} entries, expected {right}: {samples} samples with {sum(by_sample)} tokens "
            f"after a prompt of {len(prompt)}, and the header {entry!r:.400}"
        )
    if not samples or (0 in by_sample and not len(prompt)):
        raise CodecError(f"trajectory.lengths is {by_sample!r:.80}: at least one sample, each with at least one token")
    if not all(map(math.isfinite, entry.metrics.values())):
        raise CodecError(f"trajectory.metrics is {entry.metrics!r:.80}: use finite numbers")
    rest = SampleColumns(
        tokens,
        mask,
        logprobs,
        versions,
        lengths,
        rewards,
        truncated,
        episodes,
        token_rewards if entry.token_rewards else None,
        _numbers("reward_parts", entry.reward_parts, samples),
        _numbers("sample_metrics", entry.sample_metrics, samples),
        groups=_groups(entry.groups, groups) if entry.groups else (),
    )
    if entry.token_rewards or entry.token_columns:
        named = _token_columns(entry.token_columns, token_columns, token_rewards, mask)
        rest = replace(rest, token_columns=named)
    routing: Array | None = None
    prompt_pictures: tuple[PlacedPicture, ...] = ()
    if (shape := entry.routing) is not None:
        experts = experts.view(_ROUTING_DTYPES[shape.width]).reshape(-1, shape.layers, shape.per_token)
        routing, rest = experts[: len(prompt)], replace(rest, routing=experts[len(prompt) :])
    if entry.pictures is not None:
        prompt_pictures, pictures = _pictures(contents, entry.pictures, prompt, rest)
        rest = replace(rest, pictures=pictures)
    whole = SharedPrompt(prompt, rest, routing, prompt_pictures) if len(prompt) else rest
    return Trajectory(entry.rollout_id, entry.prompt_id, entry.order, whole, entry.metrics)


def _numbers(what: str, columns: _Named, samples: int) -> dict[str, NDArray[np.float64]]:
    """Return named numbers of the samples as columns, None as NaN."""
    for name, column in columns.items():
        if len(column) != samples:
            raise CodecError(f"trajectory.{what}[{name!r:.80}] has {len(column)} entries, of {samples} samples")
        if not all(math.isfinite(number) for number in column if number is not None):
            raise CodecError(f"trajectory.{what}[{name!r:.80}] is {column!r:.80}: use finite numbers")
    return {name: np.array(column, np.float64) for name, column in columns.items()}


def _token_columns(names: Sequence[str], joined: Array, token_rewards: Array, mask: Array) -> dict[str, Array]:
    """Return the token columns by name, which are `joined` end to end."""
    own, not_generated = joined.reshape(len(names), len(mask)), mask == 0
    by_name = dict(zip(names, own, strict=True))
    if len(by_name) != len(names):
        raise CodecError(f"trajectory.token_columns has the names {names!r:.80}: use distinct ones")
    for name, numbers in (("token_rewards", token_rewards), *by_name.items()):
        if len(numbers) and numbers[not_generated].any():
            raise CodecError(f"trajectory: column {name!r:.80} is not 0 at a token that no policy generated")
    return by_name


def _groups(names: Sequence[str], numbers: Array) -> tuple[str, ...]:
    """Return the comparison group of each sample."""
    if len({*names}) != len(names) or numbers.max() >= len(names):
        raise CodecError(f"trajectory.groups has the numbers {numbers.tolist()!r:.80} of the names {names!r:.80}")
    try:
        for name in names:
            check_group(name)
    except ValueError as error:
        raise CodecError(f"trajectory.groups: {error}") from error
    return tuple([names[number] for number in numbers.tolist()])


def _pictures(
    content: Array, header: PicturesHeader, prompt: Array, rest: SampleColumns
) -> tuple[tuple[PlacedPicture, ...], tuple[tuple[PlacedPicture, ...], ...]]:
    """Return the pictures of a trajectory's prompt and those of each sample after the prompt."""
    if header.samples and len(header.samples) != len(rest):
        raise CodecError(f"trajectory.pictures are of {len(header.samples)} samples, there are {len(rest)}")
    table: list[Picture] = []
    end = 0
    try:
        for sha256, size in header.contents:
            start, end = end, end + size
            table.append(Picture.received(content[start:end].tobytes(), sha256))
        of_prompt = _placed(header.prompt, table, len(prompt))
        samples = tuple(
            _placed(spans, table, length) for spans, length in zip(header.samples, rest.lengths.tolist(), strict=False)
        )
    except ValueError as error:
        raise CodecError(f"trajectory.pictures: {error}") from error
    for start, own in zip(rest.starts.tolist(), samples, strict=False):
        if any(rest.loss_mask[start + placed.position : start + placed.end].any() for placed in own):
            raise CodecError("trajectory.pictures has a picture at tokens that the policy generated")
    return of_prompt, samples


def _placed(spans: Sequence[Span], table: Sequence[Picture], tokens: int) -> tuple[PlacedPicture, ...]:
    if any(number >= len(table) for *_, number in spans):
        raise ValueError(f"{spans!r:.80} name pictures beyond the {len(table)} there are")
    placed = tuple(PlacedPicture(position, length, table[number]) for position, length, number in spans)
    check_spans(placed, tokens)
    return placed
