from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.api import Sample, Trajectory
from asyncrl.comm.codec import CodecError, Message, decode, encode
from asyncrl.comm.trajectory_codec import (
    decode_each,
    decode_trajectories,
    encode_trajectories,
    prepare,
)


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
        )
        for length in lengths
    )
    return Trajectory("rollout-1", "prompt-1", 17, samples, {"turns": 2.0})


def assert_same(one: Trajectory, other: Trajectory) -> None:
    for name in ("rollout_id", "prompt_id", "order", "metrics"):
        assert getattr(one, name) == getattr(other, name)
    assert len(one.samples) == len(other.samples)
    for a, b in zip(one.samples, other.samples, strict=True):
        assert (a.reward, a.truncated) == (b.reward, b.truncated)
        for name in ("tokens", "loss_mask", "behave_logprobs", "versions"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), strict=True)


def changed(**fields: object) -> Trajectory:
    """A valid trajectory with other `fields` in its second sample."""
    trajectory = make_trajectory([3, 4])
    first, second = trajectory.samples
    return dataclasses.replace(trajectory, samples=(first, dataclasses.replace(second, **fields)))  # type: ignore[arg-type]


def roundtrip(*trajectories: Trajectory) -> list[Trajectory]:
    return decode_trajectories(encode_trajectories(trajectories))


lengths_of_samples = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@given(st.lists(lengths_of_samples, min_size=1, max_size=5), st.integers(0, 2**32))
def test_trajectories_survive_the_wire(lengths: list[list[int]], seed: int) -> None:
    trajectories = [make_trajectory(each, seed + i) for i, each in enumerate(lengths)]
    for arrived, sent in zip(roundtrip(*trajectories), trajectories, strict=True):
        assert_same(arrived, sent)


def test_decoded_samples_are_views_into_the_message() -> None:
    frames = encode_trajectories([make_trajectory([5, 6]), make_trajectory([7])])
    payload = np.frombuffer(frames[1], np.uint8)
    for trajectory in decode_trajectories(frames):
        for sample in trajectory.samples:
            for array in (sample.tokens, sample.loss_mask, sample.behave_logprobs, sample.versions):
                assert np.shares_memory(array, payload)
                assert not array.flags.writeable


def test_columns_are_encoded_as_the_samples_they_hold() -> None:
    frames = encode_trajectories([make_trajectory([5, 6, 7]), make_trajectory([8], seed=1)])
    assert [bytes(frame) for frame in encode_trajectories(decode_trajectories(frames))] == [*map(bytes, frames)]


def test_decoded_samples_are_in_columns() -> None:
    sent = [make_trajectory([5, 6, 7], seed=1), make_trajectory([8], seed=2)]
    for arrived, original in zip(roundtrip(*sent), sent, strict=True):
        assert arrived.columns is arrived.samples
        joined = original.columns
        for name in ("tokens", "loss_mask", "behave_logprobs", "versions", "lengths", "rewards", "truncated"):
            np.testing.assert_array_equal(getattr(arrived.columns, name), getattr(joined, name), strict=True)


def test_what_was_decoded_can_be_sent_on() -> None:
    sent = make_trajectory([5, 6])
    (passed_on,) = roundtrip(*roundtrip(sent))
    assert_same(passed_on, sent)


def test_the_number_of_arrays_does_not_depend_on_the_number_of_trajectories_or_samples() -> None:
    many = decode(encode_trajectories([make_trajectory([4] * 50)] * 10))
    assert many.arrays.keys() == decode(encode_trajectories([make_trajectory([4])])).arrays.keys()


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rollout_id", ""),
        ("rollout_id", "x" * 257),
        ("prompt_id", 3),
        ("order", "first"),
        ("order", True),
        ("order", 2**63),
    ],
)
def test_ids_out_of_bounds_are_refused_by_the_sender(field: str, value: object) -> None:
    trajectory = dataclasses.replace(make_trajectory([3]), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(CodecError, match=f"trajectory.{field}"):
        prepare(trajectory)


def test_a_trajectory_without_samples_is_not_sent() -> None:
    with pytest.raises(CodecError, match="no samples"):
        prepare(make_trajectory([]))


def test_trajectories_over_the_limit_are_refused_at_both_ends() -> None:
    trajectory = make_trajectory([100])
    with pytest.raises(CodecError, match="limit 500"):
        encode_trajectories([trajectory], max_bytes=500)
    with pytest.raises(CodecError, match="limit of 500"):
        decode_trajectories(encode_trajectories([trajectory]), max_bytes=500)


def refused(message: Message, match: str) -> None:
    with pytest.raises(CodecError, match=match):
        decode_trajectories(encode(message))


def encoded(*lengths: list[int]) -> Message:
    return decode(encode_trajectories(make_trajectory(each) for each in lengths))


@pytest.mark.parametrize(
    ("column", "value", "named"),
    [
        ("rollout_ids", "", "rollout_id"),
        ("prompt_ids", 3, "prompt_id"),
        ("orders", 1.0, "order"),
        ("metrics", {"a": "b"}, "metrics"),
        ("metrics", None, "metrics"),
    ],
)
def test_a_field_out_of_bounds_refuses_its_trajectory_alone(column: str, value: object, named: str) -> None:
    message = encoded([3], [3, 4], [5])
    message.meta[column][1] = value
    first, second, third = decode_each(encode(message))
    assert isinstance(second, CodecError)
    assert f"trajectory.{named} is" in str(second)
    assert_same_samples(first, make_trajectory([3]))
    assert_same_samples(third, make_trajectory([5]))


@pytest.mark.parametrize(
    ("array", "value"), [("rewards", np.inf), ("rewards", np.nan), ("truncated", 2), ("tokens", -1), ("versions", -2)]
)
def test_a_value_out_of_bounds_refuses_its_trajectory_alone(array: str, value: float) -> None:
    message = encoded([3], [3, 4], [5])
    column = message.arrays[array].copy()
    column[1 if len(column) == 4 else 5] = value
    first, second, third = decode_each(encode(Message(message.kind, message.meta, message.arrays | {array: column})))
    assert isinstance(second, CodecError)
    assert f"trajectory.{array}" in str(second)
    assert_same_samples(first, make_trajectory([3]))
    assert_same_samples(third, make_trajectory([5]))


def assert_same_samples(arrived: Trajectory | CodecError, sent: Trajectory) -> None:
    assert isinstance(arrived, Trajectory)
    assert_same(arrived, sent)


@pytest.mark.parametrize("sizes", [[3], [1], [0], [-1], [2.0], [True], [1, 1], [], 2, [2**63], None])
def test_sizes_that_do_not_fit_the_samples_are_refused(sizes: object) -> None:
    message = encoded([3, 4])
    refused(Message(message.kind, message.meta | {"sizes": sizes}, message.arrays), "trajectory")


@pytest.mark.parametrize("lengths", [[3, 5], [7, 0], [8, -1], [2**63 - 1, 2**63 - 1]])
def test_lengths_that_do_not_fit_the_tokens_are_refused(lengths: list[int]) -> None:
    message = encoded([3, 4])
    refused(Message(message.kind, message.meta, message.arrays | {"lengths": np.array(lengths)}), "trajectory")


@pytest.mark.parametrize("column", ["rollout_ids", "prompt_ids", "orders", "metrics", "sizes"])
@pytest.mark.parametrize("value", [[], ["one", "two", "three"], "two", None])
def test_columns_of_another_length_are_refused(column: str, value: object) -> None:
    message = encoded([3], [4])
    refused(Message(message.kind, message.meta | {column: value}, message.arrays), "use a list of one entry")


@pytest.mark.parametrize("meta", [{}, {"rollout_ids": []}, {"more": 1}])
def test_meta_of_other_columns_is_refused(meta: dict[str, object]) -> None:
    message = encoded([3])
    refused(Message(message.kind, meta | (message.meta if "more" in meta else {}), message.arrays), "fields")


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
        ("extra", np.zeros(7, np.int32)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(name: str, array: np.ndarray) -> None:
    message = encoded([3, 4])
    refused(Message(message.kind, message.meta, message.arrays | {name: array}), name)


def test_a_message_of_another_kind_is_refused() -> None:
    message = encoded([3])
    refused(Message("other", message.meta, message.arrays), "kind 'other'")


@settings(max_examples=200)
@given(st.lists(lengths_of_samples, min_size=1, max_size=3), st.data())
def test_damaged_trajectories_decode_or_raise_codec_error(lengths: list[list[int]], data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode_trajectories(make_trajectory(each) for each in lengths)]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = data.draw(st.sampled_from(frames))
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        decode_trajectories(frames)
