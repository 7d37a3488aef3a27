from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.api import Sample, Trajectory
from asyncrl.api.trajectory import SharedPrompt
from asyncrl.comm.sockets import Frame
from asyncrl.comm.trajectory_codec import (
    decode_each,
    decode_trajectories,
    encode_trajectories,
    prepare,
)
from asyncrl.comm.trajectory_codec.array_messages import CodecError, Column, Header, decode_as, encode_joined
from asyncrl.comm.trajectory_codec.message_layout import DTYPES, PAIRS
from tests import every_field
from tests.examples import examples

TOKEN_COLUMNS = ("tokens", "loss_mask", "behave_logprobs", "versions")


def make_trajectory(lengths: list[int], seed: int = 0) -> Trajectory:
    generator = np.random.default_rng(seed)
    samples = tuple(
        Sample(
            tokens=generator.integers(0, 50_000, length, np.int32),
            loss_mask=generator.integers(0, 2, length, np.uint8),
            behave_logprobs=-generator.random(length, np.float32),
            versions=generator.integers(-1, 9, length, np.int32),
            reward=float(generator.normal()),
            truncated=bool(generator.integers(2)),
            episode=int(generator.integers(3)),
        )
        for length in lengths
    )
    return Trajectory("rollout-1", "prompt-1", 17, samples, {"turns": 2.0})


def with_more(trajectory: Trajectory, seed: int = 0) -> Trajectory:
    """`trajectory` with rewards of turns, reward parts and metrics in some of its samples."""
    generator = np.random.default_rng(seed)
    samples = [
        dataclasses.replace(
            sample,
            token_rewards=(generator.normal(size=len(sample.tokens)) * sample.loss_mask).astype(np.float32)
            if generator.integers(2)
            else None,
            reward_parts={"format": 0.5, "length": -1.0} if generator.integers(2) else {"format": 0.0},
            metrics={"turns": float(generator.integers(9))} if generator.integers(2) else {},
        )
        for sample in trajectory.samples
    ]
    return dataclasses.replace(trajectory, samples=tuple(samples))


def assert_same(one: Trajectory, other: Trajectory) -> None:
    for name in ("rollout_id", "prompt_id", "order", "metrics"):
        assert getattr(one, name) == getattr(other, name)
    assert len(one.samples) == len(other.samples)
    for a, b in zip(one.samples, other.samples, strict=True):
        for name in ("reward", "truncated", "episode", "reward_parts", "metrics"):
            assert getattr(a, name) == getattr(b, name), name
        no_rewards = np.zeros(len(a.tokens), np.float32)
        np.testing.assert_array_equal(
            no_rewards if a.token_rewards is None else a.token_rewards,
            no_rewards if b.token_rewards is None else b.token_rewards,
        )
        for name in TOKEN_COLUMNS:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), strict=True)


def changed(**fields: object) -> Trajectory:
    """A valid trajectory with other `fields` in its second sample, also such as no `Sample` would take."""
    trajectory = make_trajectory([3, 4])
    first, second = trajectory.samples
    for name, value in fields.items():
        object.__setattr__(second, name, value)
    return dataclasses.replace(trajectory, samples=(first, second))


def roundtrip(*trajectories: Trajectory) -> list[Trajectory]:
    return decode_trajectories(encode_trajectories(trajectories))


lengths_of_samples = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@given(st.lists(lengths_of_samples, min_size=1, max_size=5), st.integers(0, 2**32))
def test_trajectories_survive_the_wire(lengths: list[list[int]], seed: int) -> None:
    trajectories = [make_trajectory(each, seed + i) for i, each in enumerate(lengths)]
    for arrived, sent in zip(roundtrip(*trajectories), trajectories, strict=True):
        assert_same(arrived, sent)


@given(st.lists(st.tuples(lengths_of_samples, st.booleans()), min_size=1, max_size=5), st.integers(0, 2**32))
def test_rewards_of_turns_reward_parts_and_metrics_survive_the_wire(
    drawn: list[tuple[list[int], bool]], seed: int
) -> None:
    sent = []
    for number, (lengths, more) in enumerate(drawn):
        trajectory = with_prompt(number, lengths, seed + number) if number % 2 else make_trajectory(lengths, seed)
        sent.append(with_more(trajectory, seed) if more else trajectory)
    for arrived, original in zip(roundtrip(*roundtrip(*sent)), sent, strict=True):
        assert_same(arrived, original)


def test_rewards_of_turns_are_sent_by_those_trajectories_that_have_them() -> None:
    plain, rewarded = with_prompt(100, [5, 6]), with_more(with_prompt(100, [5, 6]), seed=2)
    assert roundtrip(plain, rewarded)[0].columns.token_rewards is None
    assert prepare(rewarded).nbytes - prepare(plain).nbytes == 4 * (5 + 6)


def with_prompt(prompt: int, rests: list[int], seed: int = 0, name: str = "rollout-1") -> Trajectory:
    """A group as agents make it: the same `prompt` tokens in every sample, then what was generated."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 50_000, prompt, np.int32)
    samples = tuple(
        Sample(
            tokens=np.concatenate([tokens, rest.tokens]),
            loss_mask=np.concatenate([np.zeros(prompt, np.uint8), np.ones_like(rest.loss_mask)]),
            behave_logprobs=np.concatenate([np.zeros(prompt, np.float32), rest.behave_logprobs]),
            versions=np.concatenate([np.full(prompt, -1, np.int32), rest.versions]),
            reward=rest.reward,
            truncated=rest.truncated,
        )
        for rest in make_trajectory(rests, seed).samples
    )
    return Trajectory(name, "prompt-1", 17, samples, {"turns": 2.0})


def test_a_prompt_crosses_the_wire_once_as_tokens_alone() -> None:
    def payload(prompt: int, samples: int) -> int:
        (trajectory,) = roundtrip(with_prompt(prompt, [24] * samples))
        assert_same(trajectory, with_prompt(prompt, [24] * samples))
        return len(encode_trajectories([trajectory])[1])

    assert payload(1000, 1) - payload(0, 1) == 4 * 1000
    assert payload(1000, 8) - payload(0, 8) == 4 * 1000
    assert payload(1000, 8) < 8 * 13 * 1024 / 15, "a group of 8 samples of 1024 tokens, 1000 of them a shared prompt"


def test_each_rollout_of_a_message_has_a_prompt_of_its_own() -> None:
    sent = [with_prompt(40, [3, 5], 1), with_prompt(0, [4], 2), with_prompt(40, [6, 7, 8], 3)]
    assert len(encode_trajectories(sent)[1]) < sum(len(encode_trajectories([each])[1]) for each in sent)
    for arrived, original in zip(roundtrip(*sent), sent, strict=True):
        assert_same(arrived, original)


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", 7), ("loss_mask", 1), ("behave_logprobs", -0.5), ("behave_logprobs", -0.0), ("versions", 0)],
)
@pytest.mark.parametrize("sample", [0, 2])
def test_a_prompt_is_shared_up_to_the_first_difference(field: str, value: float, sample: int) -> None:
    whole = with_prompt(100, [5, 6, 7])
    column = getattr(whole.samples[sample], field).copy()
    column[60] = value
    samples = list(whole.samples)
    samples[sample] = dataclasses.replace(samples[sample], **{field: column})
    partly = dataclasses.replace(whole, samples=tuple(samples))
    (arrived,) = roundtrip(partly)
    assert_same(arrived, partly)
    assert np.signbit(arrived.samples[sample].behave_logprobs[60]) == (field == "behave_logprobs")
    assert prepare(partly).nbytes == 60 * 4 + (3 * 40 + 5 + 6 + 7) * 13


def test_a_sample_may_be_all_prompt() -> None:
    whole = with_prompt(30, [5, 6])
    alone = Sample(*(getattr(whole.samples[0], name)[:20] for name in TOKEN_COLUMNS), reward=0.0)
    for samples in ((*whole.samples, alone), (alone,), (alone, *whole.samples)):
        trajectory = dataclasses.replace(whole, samples=samples)
        assert_same(roundtrip(trajectory)[0], trajectory)
        assert len(prepare(trajectory).samples.prompt) == 20


groups = st.tuples(st.integers(0, 40), st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 2**32))


@settings(max_examples=examples(200))
@given(st.lists(groups, min_size=1, max_size=4), st.data())
def test_prompts_shared_partly_or_not_at_all_survive_the_wire(
    drawn: list[tuple[int, list[int], int]], data: st.DataObject
) -> None:
    sent = []
    for prompt, rests, seed in drawn:
        trajectory = with_prompt(prompt, rests, seed)
        for sample in trajectory.samples:  # fresh arrays, so that they may be changed in place
            column = getattr(sample, data.draw(st.sampled_from(TOKEN_COLUMNS)))
            if data.draw(st.booleans()):
                column[data.draw(st.integers(0, len(column) - 1))] = 1
        sent.append(trajectory)
    passed_on = roundtrip(*roundtrip(*sent))
    for arrived, original in zip(passed_on, sent, strict=True):
        assert_same(arrived, original)
    assert [prepare(each).nbytes for each in passed_on] == [prepare(each).nbytes for each in sent]


def test_decoded_samples_are_views_into_the_message() -> None:
    frames = encode_trajectories([with_prompt(0, [5, 6]), with_prompt(0, [7])])
    payload = np.frombuffer(frames[1], np.uint8)
    for trajectory in decode_trajectories(frames):
        for sample in trajectory.samples:
            for array in (sample.tokens, sample.loss_mask, sample.behave_logprobs, sample.versions):
                assert np.shares_memory(array, payload)
                assert not array.flags.writeable


def test_a_decoded_prompt_is_held_once_until_samples_are_asked_for() -> None:
    frames = encode_trajectories([with_prompt(1000, [5, 6])])
    (trajectory,) = decode_trajectories(frames)
    assert isinstance(trajectory.samples, SharedPrompt)
    assert np.shares_memory(trajectory.samples.prompt, np.frombuffer(frames[1], np.uint8))
    assert [len(sample.tokens) for sample in trajectory.samples] == [1005, 1006]
    assert len(trajectory.samples[1].tokens) == len(trajectory.samples[1:][0].tokens) == 1006


def test_columns_are_encoded_as_the_samples_they_hold() -> None:
    frames = encode_trajectories([make_trajectory([5, 6, 7]), make_trajectory([8], seed=1)])
    assert [bytes(frame) for frame in encode_trajectories(decode_trajectories(frames))] == [*map(bytes, frames)]


def test_decoded_samples_are_in_columns() -> None:
    assert (unshared := roundtrip(with_prompt(0, [5, 6]))[0]).columns is unshared.samples
    sent = [make_trajectory([5, 6, 7], seed=1), make_trajectory([8], seed=2), with_prompt(9, [1, 2])]
    for arrived, original in zip(roundtrip(*sent), sent, strict=True):
        joined = original.columns
        for name in (*TOKEN_COLUMNS, "lengths", "rewards", "truncated", "episodes"):
            np.testing.assert_array_equal(getattr(arrived.columns, name), getattr(joined, name), strict=True)


def test_what_was_decoded_can_be_sent_on() -> None:
    sent = make_trajectory([5, 6])
    (passed_on,) = roundtrip(*roundtrip(sent))
    assert_same(passed_on, sent)


def test_the_number_of_arrays_does_not_depend_on_the_number_of_trajectories_or_samples() -> None:
    assert encoded(*[[4] * 50] * 10).arrays.keys() == encoded([4]).arrays.keys()


def test_wider_integers_and_floats_are_taken_where_they_fit() -> None:
    tokens, logprobs = np.arange(4, dtype=np.int64), -np.ones(4, np.float64)
    sample = roundtrip(changed(tokens=tokens, behave_logprobs=logprobs))[0].samples[1]
    np.testing.assert_array_equal(sample.tokens, tokens.astype(np.int32), strict=True)
    np.testing.assert_array_equal(sample.behave_logprobs, logprobs.astype(np.float32), strict=True)


def test_strided_samples_arrive_in_order() -> None:
    tokens = np.arange(8, dtype=np.int32)[::2]
    np.testing.assert_array_equal(roundtrip(changed(tokens=tokens))[0].samples[1].tokens, tokens)


def test_huge_but_finite_logprobs_are_no_fault() -> None:
    roundtrip(changed(behave_logprobs=np.full(4, -3e38, np.float32)))


OUT_OF_BOUNDS = [
    ("tokens", np.array([1, 2, 3, -1], np.int32)),
    ("versions", np.array([1, 2, 3, -2], np.int32)),
    ("loss_mask", np.array([0, 1, 2, 0], np.uint8)),
    ("behave_logprobs", np.array([0, 0, np.nan, 0], np.float32)),
    ("behave_logprobs", np.array([0, 0, -np.inf, 0], np.float32)),
]


@pytest.mark.parametrize(("field", "value"), OUT_OF_BOUNDS)
def test_a_bad_trajectory_among_good_ones_is_the_only_one_refused(field: str, value: np.ndarray) -> None:
    good, bad = make_trajectory([2, 3]), changed(**{field: value})
    first, second, third = decode_each(encode_trajectories([good, bad, good]))
    assert isinstance(second, CodecError)
    assert f"trajectory.{field}" in str(second)
    for other in (first, third):
        assert isinstance(other, Trajectory)
        assert_same(other, good)
    with pytest.raises(CodecError, match=f"trajectory.{field}"):
        roundtrip(good, bad)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", np.array([1, 2, 3, 2**40], np.int64)),
        ("tokens", np.array([1.0, 2.0, 3.0, 4.0])),
        ("loss_mask", np.array([0, 1, 1, 300], np.int64)),
        ("rewards", float("nan")),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_the_sender(field: str, value: object) -> None:
    trajectory = changed(**{"reward" if field == "rewards" else field: value})
    with pytest.raises(CodecError, match=f"trajectory.{field}"):
        encode_trajectories([trajectory])


@pytest.mark.parametrize(("field", "value"), [("order", 2**70), ("prompt_id", object()), ("metrics", {1j: 1.0})])
def test_fields_that_are_no_plain_data_are_refused_by_the_sender(field: str, value: object) -> None:
    trajectory = dataclasses.replace(make_trajectory([3]), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(CodecError, match=rf"{field}=.* cannot be sent"):
        prepare(trajectory)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rollout_id", ""),
        ("rollout_id", "x" * 257),
        ("prompt_id", 3),
        ("order", "first"),
        ("order", True),
        ("order", 2**63),
        ("metrics", {1: 2.0}),
    ],
)
def test_fields_out_of_bounds_are_refused_by_name(field: str, value: object) -> None:
    trajectory = dataclasses.replace(make_trajectory([3]), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(CodecError, match=rf"\$\.{field}"):
        roundtrip(trajectory)


def test_a_trajectory_without_samples_is_not_sent() -> None:
    with pytest.raises(CodecError, match="no samples"):
        prepare(make_trajectory([]))


def test_trajectories_over_the_limit_are_refused_at_both_ends() -> None:
    trajectory = make_trajectory([100])
    with pytest.raises(CodecError, match="limit 500"):
        encode_trajectories([trajectory], max_bytes=500)
    with pytest.raises(CodecError, match="limit of 500"):
        decode_trajectories(encode_trajectories([trajectory]), max_bytes=500)


_ANY = msgspec.msgpack.Decoder(Header[Any])


@dataclass
class Message:
    """Frames of trajectories, taken apart."""

    kind: str
    meta: list[msgspec.Raw]
    arrays: dict[str, np.ndarray]


def encoded(*lengths: list[int], prompt: int | None = None) -> Message:
    """A valid message's parts, to be spoilt; with `prompt`, each trajectory has one of so many tokens."""
    groups = [make_trajectory(each) if prompt is None else with_prompt(prompt, each) for each in lengths]
    header, arrays = decode_as(_ANY, encode_trajectories(groups))
    return Message(header.kind, header.meta, arrays)


def again(message: Message) -> list[Frame]:
    columns = {name: Column(array.dtype, array.shape, [array.tobytes()]) for name, array in message.arrays.items()}
    return encode_joined(message.kind, message.meta, columns)


def refused(message: Message, match: str) -> None:
    with pytest.raises(CodecError, match=match):
        decode_trajectories(again(message))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rollout_id", ""),
        ("prompt_id", 3),
        ("order", 1.0),
        ("order", 2**63),
        ("metrics", {"a": "b"}),
        ("metrics", None),
    ],
)
def test_a_field_out_of_bounds_refuses_its_trajectory_alone(field: str, value: object) -> None:
    message = encoded([3], [3, 4], [5])
    message.meta[1][field] = value  # type: ignore[index]
    first, second, third = decode_each(again(message))
    assert isinstance(second, CodecError)
    assert f"`$.{field}" in str(second)
    assert_same_samples(first, make_trajectory([3]))
    assert_same_samples(third, make_trajectory([5]))


@pytest.mark.parametrize(
    ("array", "value"),
    [("rewards", np.inf), ("rewards", np.nan), ("truncated", 2), ("episodes", -1), ("tokens", -1), ("versions", -2)],
)
def test_a_value_out_of_bounds_refuses_its_trajectory_alone(array: str, value: float) -> None:
    message = encoded([3], [3, 4], [5])
    column = message.arrays[array].copy()
    column[1 if len(column) == 4 else 5] = value
    first, second, third = decode_each(again(Message(message.kind, message.meta, message.arrays | {array: column})))
    assert isinstance(second, CodecError)
    assert f"trajectory.{array}" in str(second)
    assert_same_samples(first, make_trajectory([3]))
    assert_same_samples(third, make_trajectory([5]))


def test_a_wrong_reward_of_a_turn_refuses_its_trajectory_alone() -> None:
    for value, mask, why in ((np.nan, 1, "NaN"), (np.inf, 1, "infinity"), (1.0, 0, "no policy generated")):
        message = encoded([3], [3, 4], [5])
        rewards = np.zeros(7, np.float32)
        rewards[2] = value
        mask_T = message.arrays["loss_mask"].copy()
        mask_T[3 + 2] = mask
        arrays = message.arrays | {
            "token_rewards": rewards,
            "token_rewards_sizes": np.array([0, 7, 0]),
            "loss_mask": mask_T,
        }
        first, second, third = decode_each(again(Message(message.kind, message.meta, arrays)))
        assert why in str(second)
        assert isinstance(first, Trajectory)
        assert isinstance(third, Trajectory)


@pytest.mark.parametrize("field", ["reward_parts", "sample_metrics"])
@pytest.mark.parametrize("numbers", [[1.0], [1.0, 2.0, 3.0], [1.0, np.nan], [np.inf, 1.0]])
def test_named_numbers_that_do_not_fit_the_samples_refuse_their_trajectory_alone(
    field: str, numbers: list[float]
) -> None:
    message = encoded([3], [3, 4], [5])
    message.meta[1][field] = {"a": numbers}  # type: ignore[index]
    first, second, third = decode_each(again(message))
    assert f"trajectory.{field}['a']" in str(second)
    assert isinstance(first, Trajectory)
    assert isinstance(third, Trajectory)


def assert_same_samples(arrived: Trajectory | CodecError, sent: Trajectory) -> None:
    assert isinstance(arrived, Trajectory)
    assert_same(arrived, sent)


def test_a_sample_without_a_token_refuses_its_trajectory_alone() -> None:
    message = encoded([3], [3, 4], [5], prompt=0)
    message.arrays["lengths"] = np.array([3, 0, 7, 5])
    first, second, third = decode_each(again(message))
    assert "trajectory.lengths" in str(second)
    assert isinstance(first, Trajectory)
    assert isinstance(third, Trajectory)


@pytest.mark.parametrize("name", ["sizes", "prompt_lengths"])
@pytest.mark.parametrize("counts", [[3], [1], [0], [-1], [1, 1], [], [2**63 - 1]])
def test_sizes_and_prompts_that_do_not_fit_the_samples_are_refused(name: str, counts: list[int]) -> None:
    message = encoded([3, 4], prompt=2)
    refused(Message(message.kind, message.meta, message.arrays | {name: np.array(counts, np.int64)}), "trajectory")


@pytest.mark.parametrize("lengths", [[3, 5], [8, -1], [3], [2**63 - 1, 2**63 - 1]])
def test_lengths_that_do_not_fit_the_tokens_are_refused(lengths: list[int]) -> None:
    message = encoded([3, 4], prompt=0)
    refused(Message(message.kind, message.meta, message.arrays | {"lengths": np.array(lengths)}), "trajectory")


@pytest.mark.parametrize("meta", [{}, [], [{}], None, "two", [{}] * 3])
def test_meta_that_does_not_fit_the_arrays_is_refused(meta: object) -> None:
    message = encoded([3], [4])
    refused(dataclasses.replace(message, meta=meta), "header|sizes")


@pytest.mark.parametrize("name", ["rollout_id", "prompt_id", "order", "metrics"])
def test_a_missing_field_is_named(name: str) -> None:
    message = encoded([3])
    del message.meta[0][name]  # type: ignore[index]
    refused(message, f"missing required field `{name}`")


def test_a_missing_array_is_named() -> None:
    message = encoded([3])
    del message.arrays["versions"]
    refused(message, "expected .*versions")


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("tokens", np.zeros(7, np.int64)),
        ("tokens", np.zeros((7, 1), np.int32)),
        ("tokens", np.zeros(6, np.int32)),
        ("lengths", np.array([3, 4], np.int32)),
        ("rewards", np.zeros(3)),
        ("rewards", np.zeros(2, np.float32)),
        ("truncated", np.zeros(2, bool)),
        ("episodes", np.zeros(2, np.int64)),
        ("extra", np.zeros(7, np.int32)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(name: str, array: np.ndarray) -> None:
    message = encoded([3, 4], prompt=0)
    refused(Message(message.kind, message.meta, message.arrays | {name: array}), name)


@pytest.mark.parametrize("name", [*PAIRS, *PAIRS.values()])
def test_what_only_some_trajectories_have_does_not_come_without_its_sizes(name: str) -> None:
    message = encoded([3, 4], prompt=0)
    assert not {*PAIRS, *PAIRS.values()} & message.arrays.keys(), "no trajectory has any"
    refused(Message(message.kind, message.meta, message.arrays | {name: np.zeros(1, DTYPES[name])}), "in pairs")


@pytest.mark.parametrize(
    ("name", "array", "sizes"),
    [
        ("token_rewards", np.zeros(7, np.float32), np.zeros(1, np.int64)),
        ("token_rewards", np.zeros(7, np.float32), np.full(1, 7, np.uint8)),
        ("token_rewards", np.zeros(6, np.float32), np.full(1, 6)),
        ("groups", np.zeros(1, np.uint8), np.full(1, 1)),
        ("routing", np.zeros(1, np.uint8), np.zeros(1, np.int64)),
        ("token_columns", np.zeros(7, np.float64), np.full(1, 7)),
        ("pictures", np.zeros(1, np.uint8), np.full(1, 2)),
    ],
)
def test_what_only_some_trajectories_have_is_refused_if_it_does_not_fit(
    name: str, array: np.ndarray, sizes: np.ndarray
) -> None:
    message = encoded([3, 4], prompt=0)
    arrays = message.arrays | {name: array, PAIRS[name]: sizes}
    refused(Message(message.kind, message.meta, arrays), f"trajectory.({name}|{PAIRS[name]}) (is|has)")


def test_a_message_of_another_kind_is_refused() -> None:
    message = encoded([3])
    refused(Message("other", message.meta, message.arrays), "kind 'other'")


@settings(max_examples=examples(200))
@given(st.lists(lengths_of_samples, min_size=1, max_size=3), st.data())
def test_damaged_trajectories_decode_or_raise_codec_error(lengths: list[list[int]], data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode_trajectories(make_trajectory(each) for each in lengths)]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = data.draw(st.sampled_from(frames))
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        decode_trajectories(frames)


def with_routing(trajectory: Trajectory, dtype: type = np.uint8, seed: int = 0, layers: int = 3) -> Trajectory:
    """`trajectory` whose tokens went through two experts in each layer: the same ones as far as a prompt is shared."""
    generator = np.random.default_rng(seed)
    most = max(len(sample.tokens) for sample in trajectory.samples)
    common = generator.integers(0, 200, (most, layers, 2)).astype(dtype)
    samples = []
    for sample in trajectory.samples:
        own = generator.integers(0, 200, (len(sample.tokens), layers, 2)).astype(dtype)
        start = int(sample.loss_mask.argmax())
        own[:start] = common[:start]
        samples.append(dataclasses.replace(sample, routing=own))
    return dataclasses.replace(trajectory, samples=tuple(samples))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_the_experts_of_tokens_survive_the_wire_beside_trajectories_without(dtype: type) -> None:
    groups = [
        with_routing(with_prompt(4, [2, 3]), dtype),
        make_trajectory([3, 4]),
        with_routing(make_trajectory([5]), dtype, seed=3, layers=1),
        with_routing(with_more(with_prompt(3, [3, 1, 2])), np.uint8),
    ]
    for _ in range(2):  # as made, and as decoded
        decoded = decode_trajectories(encode_trajectories(groups))
        for one, other in zip(groups, decoded, strict=True):
            assert_same(one, other)
            for a, b in zip(one.samples, other.samples, strict=True):
                assert (a.routing is None) == (b.routing is None)
                if a.routing is not None and b.routing is not None:
                    assert a.routing.dtype == b.routing.dtype
                    np.testing.assert_array_equal(a.routing, b.routing)
        groups = decoded


def test_every_field_of_a_sample_survives_the_wire() -> None:
    assert every_field.fields_without_a_value() == []
    sent = Trajectory("rollout-1", "prompt-1", 17, (every_field.SAMPLE, every_field.SAMPLE))
    for _ in range(2):  # as made, and as decoded
        (arrived,) = roundtrip(sent)
        for sample in arrived.samples:
            assert every_field.differences(sample, every_field.SAMPLE, but=["frames"]) == []
        sent = arrived


def test_a_prompt_is_shared_as_far_as_its_experts_are() -> None:
    whole = with_routing(with_prompt(4, [2, 3]))
    samples = list(whole.samples)
    assert samples[1].routing is not None
    other = samples[1].routing.copy()
    other[2, 1, 0] += 1
    changed = dataclasses.replace(whole, samples=(samples[0], dataclasses.replace(samples[1], routing=other)))
    for trajectory, shared in ((whole, 4), (changed, 2)):
        (decoded,) = decode_trajectories(encode_trajectories([trajectory]))
        assert isinstance(decoded.samples, SharedPrompt)
        assert len(decoded.samples.prompt) == shared
        for a, b in zip(trajectory.samples, decoded.samples, strict=True):
            np.testing.assert_array_equal(a.routing, b.routing)


def routed() -> Message:
    """Three trajectories, the second of which has a routing: 2 + 3 tokens, 3 layers, 2 experts."""
    groups = [make_trajectory([3]), with_routing(make_trajectory([2, 3])), make_trajectory([4])]
    header, arrays = decode_as(_ANY, encode_trajectories(groups))
    return Message(header.kind, header.meta, arrays)


@pytest.mark.parametrize(
    ("routing", "why"),
    [
        (None, "30 bytes, its header None"),
        ({"layers": 3, "per_token": 2, "width": 2}, "need 60"),
        ({"layers": 2, "per_token": 2, "width": 1}, "need 20"),
        ({"layers": 0, "per_token": 2, "width": 1}, "layers"),
        ({"layers": 1 << 40, "per_token": 2, "width": 1}, "layers"),
        ({"layers": 3, "per_token": 65, "width": 1}, "per_token"),
        ({"layers": 3, "per_token": 2, "width": 4}, "width"),
        ({"layers": 3, "width": 1}, "per_token"),
        ("three", "routing"),
    ],
    ids=str,
)
def test_a_header_that_does_not_fit_the_experts_refuses_its_trajectory_alone(routing: object, why: str) -> None:
    message = routed()
    message.meta[1]["routing"] = routing  # type: ignore[index]
    first, second, third = decode_each(again(message))
    assert isinstance(first, Trajectory)
    assert isinstance(third, Trajectory)
    assert isinstance(second, CodecError)
    assert why in str(second)


@pytest.mark.parametrize("sizes", [[0, 29, 0], [30, 0, 0], [0, 30, 1], [-30, 60, 0], [0, 2**62, 2**62], [30]])
def test_sizes_that_do_not_fit_the_experts_are_refused(sizes: list[int]) -> None:
    message = routed()
    refused(Message(message.kind, message.meta, message.arrays | {"routing_sizes": np.array(sizes)}), "routing")


def test_experts_that_cannot_travel_are_refused_by_the_sender() -> None:
    sample = make_trajectory([3]).samples[0]
    for routing, why in (
        (np.zeros((3, 2, 2), np.int32), "use uint8 or uint16"),
        (np.zeros((3, 0, 2), np.uint8), "use 1 to 1024"),
        (np.zeros((3, 2, 65), np.uint8), "and 1 to 64"),
    ):
        with pytest.raises(CodecError, match=why):
            prepare(Trajectory("r", "p", 0, (dataclasses.replace(sample, routing=routing),)))
