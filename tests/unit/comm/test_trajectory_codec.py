from __future__ import annotations

import contextlib
import dataclasses
import re

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.api import Sample, Trajectory
from asyncrl.api.trajectory import SampleColumns, SharedPrompt
from asyncrl.comm import trajectory_codec
from asyncrl.comm.trajectory_codec import (
    COLUMNS,
    MAGIC,
    PROTOCOL_VERSION,
    CodecError,
    decode_each,
    decode_trajectories,
    encode_trajectories,
    prepare,
)
from tests import every_field
from tests.examples import examples
from tests.trajectory_frames import Message, taken_apart

SAMPLE_BYTES = 8 + 8 + 1 + 4  # its length, its reward, whether it is truncated, its episode
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


def test_token_columns_alone_bring_no_rewards_of_turns() -> None:
    sample = make_trajectory([5]).samples[0]
    column = np.where(sample.loss_mask, 0.5, 0.0).astype(np.float32)
    sent = Trajectory("r", "p", 0, (dataclasses.replace(sample, token_columns={"entropy": column}),))
    columns = roundtrip(sent)[0].columns
    assert columns.token_rewards is None
    np.testing.assert_array_equal(columns.token_columns["entropy"], column)


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
    assert prepare(partly).nbytes == 60 * 4 + (3 * 40 + 5 + 6 + 7) * 13 + 3 * SAMPLE_BYTES


def test_a_sample_may_be_all_prompt() -> None:
    whole = with_prompt(30, [5, 6])
    alone = Sample(*(getattr(whole.samples[0], name)[:20] for name in TOKEN_COLUMNS), reward=0.0)
    for samples in ((*whole.samples, alone), (alone,), (alone, *whole.samples)):
        trajectory = dataclasses.replace(whole, samples=samples)
        assert_same(roundtrip(trajectory)[0], trajectory)
        (arrived,) = roundtrip(trajectory)
        assert isinstance(arrived.samples, SharedPrompt)
        assert len(arrived.samples.prompt) == 20


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
                assert array.flags.aligned
                assert not array.flags.writeable


def test_views_of_a_writable_buffer_are_read_only_too() -> None:
    (trajectory,) = decode_trajectories([bytearray(frame) for frame in encode_trajectories([make_trajectory([3])])])
    with pytest.raises(ValueError, match="read-only"):
        trajectory.columns.tokens[0] = 7


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
    ("field", "value"), [("episodes", np.array([2**40])), ("truncated", np.array([300])), ("lengths", np.array([4.5]))]
)
def test_columns_that_the_wire_cannot_carry_are_refused_before_they_share_a_message(
    field: str, value: np.ndarray
) -> None:
    columns = SampleColumns.join(make_trajectory([4]).samples)
    trajectory = Trajectory("r", "p", 0, dataclasses.replace(columns, **{field: value}))
    with pytest.raises(CodecError, match=f"trajectory.{field}"):
        prepare(trajectory)


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


def test_trajectories_over_the_limit_are_refused_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    trajectory = make_trajectory([100])
    with pytest.raises(CodecError, match="limit of 500"):
        decode_each(encode_trajectories([trajectory]), max_bytes=500)
    monkeypatch.setattr(trajectory_codec, "MAX_BYTES", 500)
    with pytest.raises(CodecError, match="limit 500"):
        encode_trajectories([trajectory])


def encoded(*lengths: list[int], prompt: int | None = None) -> Message:
    """A valid message's parts, to be spoilt; with `prompt`, each trajectory has one of so many tokens."""
    return taken_apart([make_trajectory(each) if prompt is None else with_prompt(prompt, each) for each in lengths])


def refused(message: Message, match: str) -> None:
    with pytest.raises(CodecError, match=match):
        decode_trajectories(message.frames())


def refused_alone(message: Message, match: str) -> None:
    """The second of three trajectories is refused, and no other."""
    first, second, third = decode_each(message.frames())
    assert isinstance(second, CodecError)
    assert match in str(second)
    assert isinstance(first, Trajectory)
    assert isinstance(third, Trajectory)


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
    message.entries[1][field] = value
    refused_alone(message, f"`$.{field}")
    first, _, third = decode_each(message.frames())
    assert_same_samples(first, make_trajectory([3]))
    assert_same_samples(third, make_trajectory([5]))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("rewards", np.inf),
        ("rewards", np.nan),
        ("truncated", 2),
        ("episodes", -1),
        ("tokens", -1),
        ("versions", -2),
        ("loss_mask", 2),
        ("behave_logprobs", np.nan),
    ],
)
def test_a_value_out_of_bounds_refuses_its_trajectory_alone(column: str, value: float) -> None:
    message = encoded([3], [3, 4], [5])
    message.columns[1][column][1] = value
    refused_alone(message, f"trajectory.{column}")
    first, _, third = decode_each(message.frames())
    assert_same_samples(first, make_trajectory([3]))
    assert_same_samples(third, make_trajectory([5]))


def test_a_token_of_a_prompt_out_of_bounds_refuses_its_trajectory_alone() -> None:
    message = encoded([3], [3, 4], [5], prompt=2)
    message.columns[1]["prompts"][1] = -1
    refused_alone(message, "trajectory.prompts has -1")


@pytest.mark.parametrize("name", ["token_rewards", "token_columns"])
@pytest.mark.parametrize(
    ("value", "mask", "why"), [(np.nan, 1, "NaN"), (np.inf, 1, "infinity"), (1.0, 0, "no policy generated")]
)
def test_a_wrong_number_of_a_token_refuses_its_trajectory_alone(name: str, value: float, mask: int, why: str) -> None:
    message = encoded([3], [3, 4], [5])
    message.entries[1][name] = True if name == "token_rewards" else ["entropy"]
    numbers = np.zeros(7, np.float32)
    numbers[2] = value
    message.columns[1][name] = numbers
    message.columns[1]["loss_mask"][2] = mask
    refused_alone(message, why)


def test_token_columns_of_one_name_refuse_their_trajectory_alone() -> None:
    message = encoded([3], [3, 4], [5])
    message.entries[1]["token_columns"] = ["entropy", "entropy"]
    message.columns[1]["token_columns"] = np.zeros(14, np.float32)
    refused_alone(message, "use distinct ones")


@pytest.mark.parametrize("field", ["reward_parts", "sample_metrics"])
@pytest.mark.parametrize("numbers", [[1.0], [1.0, 2.0, 3.0], [1.0, np.nan], [np.inf, 1.0]])
def test_named_numbers_that_do_not_fit_the_samples_refuse_their_trajectory_alone(
    field: str, numbers: list[float]
) -> None:
    message = encoded([3], [3, 4], [5])
    message.entries[1][field] = {"a": numbers}
    refused_alone(message, f"trajectory.{field}['a']")


def test_a_metric_that_is_not_finite_refuses_its_trajectory_alone() -> None:
    message = encoded([3], [3, 4], [5])
    message.entries[1]["metrics"] = {"a": np.inf}
    refused_alone(message, "trajectory.metrics")


@pytest.mark.parametrize(
    ("names", "numbers"), [(["a"], [0, 1]), (["a", "a"], [0, 1]), (["a", "b\n"], [0, 1]), ([], [0, 1]), (["a"], [0])]
)
def test_comparison_groups_that_do_not_fit_refuse_their_trajectory_alone(names: list[str], numbers: list[int]) -> None:
    message = encoded([3], [3, 4], [5])
    message.entries[1]["groups"] = names
    message.columns[1]["groups"] = np.array(numbers, np.uint8)
    refused_alone(message, "trajectory.groups")


def assert_same_samples(arrived: Trajectory | CodecError, sent: Trajectory) -> None:
    assert isinstance(arrived, Trajectory)
    assert_same(arrived, sent)


@pytest.mark.parametrize("lengths", [[0, 7], [], [3, 5], [8, -1], [7, 0], [2**63 - 1, 2**63 - 1, 9]])
def test_lengths_that_do_not_fit_refuse_their_trajectory_alone(lengths: list[int]) -> None:
    message = encoded([3], [3, 4], [5], prompt=0)
    message.columns[1]["lengths"] = np.array(lengths, np.int64)
    if len(lengths) != 2:
        for name in ("rewards", "truncated", "episodes"):
            message.columns[1][name] = np.zeros(len(lengths), COLUMNS[name].dtype)
    refused_alone(message, "trajectory.")


@pytest.mark.parametrize("name", [name for name in COLUMNS if name != "prompts"])
@pytest.mark.parametrize("more", [1, 2])
def test_a_column_of_another_size_refuses_its_trajectory_alone(name: str, more: int) -> None:
    message = encoded([3], [3, 4], [5])
    own = message.columns[1]
    own[name] = np.concatenate([own[name], np.ones(more, COLUMNS[name].dtype)])
    refused_alone(message, "entries, expected")


@pytest.mark.parametrize("size", [-1, 2**62, 2**63 - 1, 4])
@pytest.mark.parametrize("column", range(len(COLUMNS)))
def test_sizes_that_do_not_fit_the_payload_are_refused(size: int, column: int) -> None:
    message = encoded([3], [3, 4])
    sizes = [[len(own[name]) for name in COLUMNS] for own in message.columns]
    assert decode_trajectories(message.frames(sizes))
    sizes[1][column] = sizes[0][column] = size
    with pytest.raises(CodecError, match="payload has"):
        decode_trajectories(message.frames(sizes))


@pytest.mark.parametrize("forged", [[2**63 - 1, 2**63 - 1, 3 + 7 + 5 + 2], [-1, 3 + 7 + 1, 5]])
def test_wrong_sizes_with_the_right_sum_are_refused(forged: list[int]) -> None:
    message = encoded([3], [3, 4], [5])
    sizes = [[len(own[name]) for name in COLUMNS] for own in message.columns]
    for own, size in zip(sizes, forged, strict=True):
        own[[*COLUMNS].index("tokens")] = size
    with pytest.raises(CodecError, match="payload has"):
        decode_each(message.frames(sizes))


@pytest.mark.parametrize("entries", [{}, [], [{}], None, "two", [{}] * 3])
def test_entries_that_do_not_fit_the_payload_are_refused(entries: object) -> None:
    message = encoded([3], [4])
    message.header["trajectories"] = entries
    refused(message, "header|payload")


@pytest.mark.parametrize("name", ["rollout_id", "prompt_id", "order", "metrics"])
def test_a_missing_field_is_named(name: str) -> None:
    message = encoded([3])
    del message.entries[0][name]
    refused(message, f"missing required field `{name}`")


def header(**fields: object) -> bytes:
    """The header of a sound message, with other `fields`."""
    return msgspec.msgpack.encode(encoded([3]).header | fields)


PAYLOAD = encode_trajectories([make_trajectory([3])])[1]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [header()],
        [header(), b""],
        [header(), PAYLOAD, b""],
        [header(), PAYLOAD, PAYLOAD],
        [header(), PAYLOAD[:-1]],
        [header(), PAYLOAD + b"\0"],
        [header(), PAYLOAD[: 8 * len(COLUMNS) - 1]],
        [header() + b"tail", PAYLOAD],
        [header(magic="other"), PAYLOAD],
        [header(protocol=PROTOCOL_VERSION - 1), PAYLOAD],
        [msgspec.msgpack.encode([MAGIC, PROTOCOL_VERSION, []]), PAYLOAD],
        [msgspec.msgpack.encode({"a": 1}), PAYLOAD],
        [b"\x91" * 100_000, PAYLOAD],
        [b"\xdd\xff\xff\xff\xff", PAYLOAD],
        [header(trajectories=[0]).replace(b"\x91\x00", b"\x91" * 100_000), PAYLOAD],
    ],
)
def test_malformed_frames_raise_codec_error(frames: list[bytes]) -> None:
    with pytest.raises(CodecError):
        decode_each(frames)


@pytest.mark.parametrize(
    ("frame", "named"),
    [
        (header(trajectories=1), "Expected `array`, got `int` - at `$.trajectories`"),
        (header(magic="other"), "$.magic"),
        (header(protocol=3), "protocol version 4"),
    ],
)
def test_a_malformed_header_names_the_field_and_what_was_expected(frame: bytes, named: str) -> None:
    with pytest.raises(CodecError, match=re.escape(named)):
        decode_trajectories([frame, PAYLOAD])


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_raise_nothing_but_codec_error(frames: list[bytes]) -> None:
    with pytest.raises(CodecError):
        decode_trajectories(frames)


@settings(max_examples=examples(200))
@given(st.lists(lengths_of_samples, min_size=1, max_size=3), st.data())
def test_damaged_trajectories_decode_or_raise_codec_error(lengths: list[list[int]], data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode_trajectories(make_trajectory(each) for each in lengths)]
    frame = data.draw(st.sampled_from(frames))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    del frame[data.draw(st.integers(0, len(frame))) :]
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


def test_every_field_of_a_trajectory_and_its_samples_survives_the_wire() -> None:
    assert every_field.fields_without_a_value() == []
    sent = every_field.TRAJECTORY
    for _ in range(2):  # as made, and as decoded
        (arrived,) = roundtrip(sent)
        assert every_field.differences(arrived, every_field.TRAJECTORY, but=["frames"]) == []
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
    return taken_apart([make_trajectory([3]), with_routing(make_trajectory([2, 3])), make_trajectory([4])])


@pytest.mark.parametrize(
    ("routing", "why"),
    [
        (None, "30 entries, expected 0"),
        ({"layers": 3, "per_token": 2, "width": 2}, "30 entries, expected 60"),
        ({"layers": 2, "per_token": 2, "width": 1}, "30 entries, expected 20"),
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
    message.entries[1]["routing"] = routing
    refused_alone(message, why)


def test_experts_that_cannot_travel_are_refused_by_the_sender() -> None:
    sample = make_trajectory([3]).samples[0]
    for routing, why in (
        (np.zeros((3, 2, 2), np.int32), "use uint8 or uint16"),
        (np.zeros((3, 0, 2), np.uint8), "use 1 to 1024"),
        (np.zeros((3, 2, 65), np.uint8), "and 1 to 64"),
    ):
        with pytest.raises(CodecError, match=why):
            prepare(Trajectory("r", "p", 0, (dataclasses.replace(sample, routing=routing),)))
