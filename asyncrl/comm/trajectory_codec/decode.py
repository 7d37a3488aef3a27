"""Decode frames into trajectories. All contents are checked, and each invalid trajectory is refused separately."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from asyncrl.api.picture import Picture, PlacedPicture, check_spans
from asyncrl.api.trajectory import SampleColumns, SharedPrompt, Trajectory, check_group
from asyncrl.comm.sockets import Frame
from asyncrl.comm.trajectory_codec.array_messages import (
    DEFAULT_MAX_BYTES,
    Array,
    CodecError,
    Header,
    decode_as,
    decode_typed,
)
from asyncrl.comm.trajectory_codec.message_layout import (
    BY_TOKEN,
    DTYPES,
    KIND,
    PAIRS,
    REQUIRED,
    ROUTING_DTYPES,
    PicturesHeader,
    RoutingHeader,
    Span,
    TrajectoryHeader,
)
from asyncrl.comm.typed import msgpack_decoder

_ENTRY = msgpack_decoder(TrajectoryHeader)
_HEADER = msgpack_decoder(Header[list[msgspec.Raw]])  # raw, so that an invalid entry affects only its own trajectory


def decode_trajectories(frames: Sequence[Frame], *, max_bytes: int = DEFAULT_MAX_BYTES) -> list[Trajectory]:
    """Return the trajectories in `frames`.

    Raises:
        CodecError: the frames are malformed or larger than `max_bytes`, or a value is out of its bounds.
    """
    decoded = decode_each(frames, max_bytes=max_bytes)
    for trajectory in decoded:
        if isinstance(trajectory, CodecError):
            raise trajectory
    return [trajectory for trajectory in decoded if isinstance(trajectory, Trajectory)]


def decode_each(frames: Sequence[Frame], *, max_bytes: int = DEFAULT_MAX_BYTES) -> list[Trajectory | CodecError]:
    """Return each trajectory in `frames`, or the error in it.

    Raises:
        CodecError: the frames are malformed or larger than `max_bytes` as a whole.
    """
    meta, arrays = _parts(frames, max_bytes)
    sizes = _counts(arrays, "sizes", len(meta), least=1)
    prompt_lengths = _counts(arrays, "prompt_lengths", len(meta), least=0)
    lengths = _counts(arrays, "lengths", sum(sizes), least=0)
    prompts = _array(arrays, "prompts", sum(prompt_lengths))
    columns: list[Any] = [_array(arrays, name, sum(lengths)) for name in BY_TOKEN]
    by_sample: list[Any] = [
        _array(arrays, name, len(lengths)) for name in ("lengths", "rewards", "truncated", "episodes")
    ]
    sound = (
        _fault(prompts, SampleColumns(*columns, *by_sample)) is None
    )  # check each trajectory only if this finds a fault
    token_ends = list(accumulate(lengths))
    optional = [_by_trajectory(arrays, name, len(meta)) for name in PAIRS]
    decoded: list[Trajectory | CodecError] = []
    end = last = prompt_end = 0
    for raw, size, prompt_length, own_rewards, own_columns, own_groups, own_routing, content in zip(
        meta, sizes, prompt_lengths, *optional, strict=True
    ):
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
            if len(own_rewards) or entry.reward_parts or entry.sample_metrics or entry.token_columns:
                rest = _with_more(rest, own_rewards, entry, own_columns)
            if not prompt_length and 0 in lengths[start:end]:
                raise CodecError("trajectory.lengths has 0 where there is no prompt: a sample has at least one token")
            if routed is not None:
                rest = replace(rest, routing=routed[prompt_length:])
            of_prompt_pictures: tuple[PlacedPicture, ...] = ()
            if entry.pictures is not None or len(content):
                of_prompt_pictures, pictures = _pictures(content, entry.pictures, prompt, rest)
                rest = replace(rest, pictures=pictures)
            if entry.groups or len(own_groups):
                rest = replace(rest, groups=_names(own_groups.tolist(), entry.groups, size))
        except CodecError as error:
            decoded.append(error)
            continue
        of_prompt = None if routed is None else routed[:prompt_length]
        samples = SharedPrompt(prompt, rest, of_prompt, of_prompt_pictures) if prompt_length else rest
        decoded.append(Trajectory(entry.rollout_id, entry.prompt_id, entry.order, samples, entry.metrics))
    return decoded


def _parts(frames: Sequence[Frame], max_bytes: int) -> tuple[list[msgspec.Raw], dict[str, Array]]:
    """Return the undecoded entries of the trajectories, and the arrays of the message."""
    header, arrays = decode_as(_HEADER, frames, max_bytes=max_bytes)
    if header.kind != KIND:
        raise CodecError(f"message is of kind {header.kind!r:.80}, expected {KIND!r}")
    named = arrays.keys()
    if not REQUIRED <= named <= DTYPES.keys() or any((name in named) != (by in named) for name, by in PAIRS.items()):
        raise CodecError(
            f"trajectories have the arrays {[*arrays]!r:.400}, expected {', '.join(REQUIRED)}, and if at all these in "
            f"pairs: {', '.join(f'{name} and {by}' for name, by in PAIRS.items())}"
        )
    return header.meta, arrays


def _names(numbers: Sequence[int], names: Sequence[str], samples: int) -> tuple[str, ...]:
    """Return the comparison group of each of the `samples`.

    Raises:
        CodecError: there is not one number per sample, a number has no name in `names`, or the names are not distinct
            or not valid.
    """
    if len({*names}) != len(names) or len(numbers) != samples or max(numbers) >= len(names):
        raise CodecError(f"trajectory.groups has the numbers {numbers!r:.80} of the names {names!r:.80}")
    try:
        for name in names:
            check_group(name)
    except ValueError as error:
        raise CodecError(f"trajectory.groups: {error}") from error
    return tuple(names[number] for number in numbers)


def _by_trajectory(arrays: dict[str, Array], name: str, trajectories: int) -> list[Array]:
    """Return each trajectory's part of the array `name`, by the paired sizes. Without the array all parts are empty."""
    if name not in arrays:
        return [np.empty(0, DTYPES[name])] * trajectories
    sizes = _counts(arrays, PAIRS[name], trajectories, least=0)
    whole = _array(arrays, name, sum(sizes))
    return [whole[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _pictures(
    content: Array, header: PicturesHeader | None, prompt: Array, rest: SampleColumns
) -> tuple[tuple[PlacedPicture, ...], tuple[tuple[PlacedPicture, ...], ...]]:
    """Return the pictures of a trajectory's prompt and those of each sample after the prompt.

    Raises:
        CodecError: the bytes are not the pictures that the header names, or a span is outside the prompt or sample or
            covers generated tokens.
    """
    contents = [] if header is None else header.contents
    if header is None or sum(size for _, size in contents) != len(content):
        raise CodecError(f"trajectory.pictures has {len(content)} bytes, its header names {contents!r:.80}")
    if header.samples and len(header.samples) != len(rest):
        raise CodecError(f"trajectory.pictures are of {len(header.samples)} samples, there are {len(rest)}")
    table: list[Picture] = []
    end = 0
    try:
        for sha256, size in contents:
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


def _routing(data: Array, header: RoutingHeader | None, tokens: int) -> Array | None:
    """Return a trajectory's routing `[tokens, layers, per_token]` from its bytes; None if it has none.

    Raises:
        CodecError: the bytes do not match its header.
    """
    expected = 0 if header is None else tokens * header.nbytes
    if len(data) != expected:
        raise CodecError(
            f"trajectory.routing has {len(data)} bytes, its header {header} and {tokens} tokens need {expected}"
        )
    if header is None:
        return None
    routing: Array = data.view(ROUTING_DTYPES[header.width]).reshape(tokens, header.layers, header.per_token)
    return routing


def _with_more(rest: SampleColumns, own_rewards: Array, entry: TrajectoryHeader, own_columns: Array) -> SampleColumns:
    """Return `rest` with the optional parts. `own_rewards` has its token rewards, if there are any, `own_columns` its
    token columns, joined.

    Raises:
        CodecError: a value is out of bounds, or a list does not have one entry per sample.
    """
    token_rewards, tokens, names = None, len(rest.tokens), entry.token_columns
    if len(own_rewards):
        token_rewards = own_rewards
        if len(token_rewards) != tokens:
            raise CodecError(f"trajectory.token_rewards has {len(token_rewards)} numbers for {tokens} tokens")
        if not np.isfinite(token_rewards).all():
            raise CodecError("trajectory.token_rewards holds a NaN or an infinity")
        if (token_rewards[rest.loss_mask == 0] != 0).any():
            raise CodecError("trajectory.token_rewards rewards a token that no policy generated")
    if len(own_columns) != len(names) * tokens or len({*names}) != len(names):
        raise CodecError(
            f"trajectory.token_columns has {len(own_columns)} numbers for {names!r:.80} of {tokens} tokens"
        )
    by_name = dict(zip(names, own_columns.reshape(len(names), tokens), strict=True))
    for name, own in by_name.items():
        if not np.isfinite(own).all() or (own[rest.loss_mask == 0] != 0).any():
            raise CodecError(
                f"trajectory.token_columns[{name!r:.80}] is not finite, or not 0 where nothing was generated"
            )
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
    return replace(rest, token_rewards=token_rewards, reward_parts=reward_parts, metrics=metrics, token_columns=by_name)


def _counts(arrays: dict[str, Array], name: str, length: int, *, least: int) -> list[int]:
    """Return the array `name`, which must have `length` entries of at least `least`, as a list."""
    counts: list[int] = _array(arrays, name, length).tolist()
    if not counts or min(counts) < least:
        raise CodecError(f"trajectory.{name} is {counts!r:.80}: use integers of at least {least}")
    return counts


def _array(arrays: dict[str, Array], name: str, length: int) -> Array:
    """Return the array `name`, which must have its dtype and this length."""
    array, dtype = arrays[name], DTYPES[name]
    if array.dtype != dtype or array.shape != (length,):
        raise CodecError(f"trajectory.{name} is {array.dtype} {array.shape}, expected {dtype} ({length},)")
    return array


def _fault(prompt: Array, samples: SampleColumns) -> str | None:
    """Describe a value that is out of bounds in this prompt or its samples; None if all are in bounds."""
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
