"""Pictures of trajectories on the wire: each content once, in the places where they stood; the rest is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.api import Sample, Trajectory
from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.api.trajectory import SharedPrompt
from asyncrl.comm.trajectory_codec import CodecError, decode_each, decode_trajectories, encode_trajectories, prepare
from asyncrl.trainer.batches.micro_batch_layout import distinct_tokens
from asyncrl.trainer.batches.step_batch import build_step_batch
from asyncrl.trainer.rank.inbox import bytes_of
from asyncrl.trainer.rank.inbox_store import InboxStore
from tests.examples import examples
from tests.trajectory_frames import taken_apart

PICTURES = [
    Picture.from_array(np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8)) for seed in range(3)
]
PLACEHOLDER = 9
GIVEN, ROWS = "given", 4

Part = tuple[str, int]  # ("given", n tokens), ("generated", n tokens) or ("picture", number)


def sample_of(parts: list[Part]) -> Sample:
    tokens: list[int] = []
    mask: list[int] = []
    pictures: list[PlacedPicture] = []
    for kind, count in parts:
        if kind == "picture":
            pictures.append(PlacedPicture(len(tokens), ROWS, PICTURES[count]))
        size = ROWS if kind == "picture" else count
        tokens += [PLACEHOLDER if kind == "picture" else 1] * size
        mask += [int(kind == "generated")] * size
    made = np.array(mask, np.uint8)
    return Sample(
        np.array(tokens, np.int32),
        made,
        np.where(made == 1, -1, 0).astype(np.float32),
        np.where(made == 1, 3, -1).astype(np.int32),
        reward=1.0,
        pictures=tuple(pictures),
    )


def group(*samples: list[Part]) -> Trajectory:
    return Trajectory("r", "p", 0, tuple(map(sample_of, samples)))


def shown(trajectory: Trajectory) -> list[tuple[list[int], list[tuple[int, int, bytes]]]]:
    return [
        (sample.tokens.tolist(), [(each.position, each.length, each.picture.data) for each in sample.pictures])
        for sample in trajectory.samples
    ]


parts = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["given", "generated"]), st.integers(1, 3)),
        st.tuples(st.just("picture"), st.integers(0, 2)),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=examples(40))
@given(st.lists(st.lists(parts, min_size=1, max_size=4), min_size=1, max_size=3))
def test_pictures_survive_the_wire_and_a_second_journey(groups: list[list[list[Part]]]) -> None:
    sent = [replace(group(*samples), rollout_id=str(number)) for number, samples in enumerate(groups)]
    for _ in range(2):  # the second time from columns, with the prompts split off
        arrived = decode_trajectories(encode_trajectories(sent))
        assert [*map(shown, arrived)] == [*map(shown, sent)]
        for trajectory in arrived:
            prompt = trajectory.samples.prompt if isinstance(trajectory.samples, SharedPrompt) else []
            for placed in trajectory.samples.pictures if isinstance(trajectory.samples, SharedPrompt) else ():
                assert placed.end <= len(prompt)
        sent = arrived


def test_a_group_of_16_over_one_picture_sends_its_bytes_once() -> None:
    question: list[Part] = [("given", 3), ("picture", 0), ("given", 2)]
    with_picture = group(*[[*question, ("generated", 1 + number)] for number in range(16)])
    without = group(*[[("given", 3 + ROWS + 2), ("generated", 1 + number)] for number in range(16)])
    size, plain = (sum(map(len, encode_trajectories([each]))) for each in (with_picture, without))
    assert 0 < size - plain - len(PICTURES[0].data) < 300
    (arrived,) = decode_trajectories(encode_trajectories([with_picture]))
    assert isinstance(arrived.samples, SharedPrompt)
    assert len(arrived.samples.prompt) == 3 + ROWS + 2
    assert len({id(placed.picture) for sample in arrived.samples for placed in sample.pictures}) == 1
    assert bytes_of(arrived) - bytes_of(decode_trajectories(encode_trajectories([without]))[0]) == len(PICTURES[0].data)
    assert prepare(with_picture).nbytes - prepare(without).nbytes == len(PICTURES[0].data)


def test_a_text_sends_nothing_for_pictures() -> None:
    text = group([("given", 3), ("generated", 2)])
    header, _ = encode_trajectories([text])
    assert b"picture" not in bytes(header)
    with_one = group([("given", 3), ("picture", 1), ("generated", 2)])
    assert [*map(shown, decode_trajectories(encode_trajectories([text, with_one, text])))] == [
        shown(text),
        shown(with_one),
        shown(text),
    ]


def test_equal_ids_over_different_pictures_are_no_common_prompt() -> None:
    two = group(*[[("given", 2), ("picture", number), ("given", 1), ("generated", 1)] for number in (0, 1)])
    (arrived,) = decode_trajectories(encode_trajectories([two]))
    assert isinstance(arrived.samples, SharedPrompt)
    assert len(arrived.samples.prompt) == 2
    assert distinct_tokens(two.samples) == distinct_tokens(arrived.samples) == 2 + 2 * (ROWS + 2)
    same = group(*[[("given", 2), ("picture", 0), ("given", 1), ("generated", n)] for n in (1, 2)])
    assert distinct_tokens(same.samples) == 2 + ROWS + 1 + 2


def test_a_step_holds_each_picture_once() -> None:
    question: list[Part] = [("given", 1), ("picture", 0), ("generated", 2)]
    sent = [
        group(question, question),
        group([("given", 1), ("generated", 1)]),
        group([("given", 1), ("picture", 1), ("picture", 0), ("generated", 1)]),
    ]
    arrived = [decode_trajectories(encode_trajectories([each]))[0] for each in sent]  # in messages of their own
    batch = build_step_batch(arrived, [0, 0, 0], version=3, num_minibatches=1)
    assert [[placed.picture.sha256 for placed in own] for own in batch.pictures] == [
        [PICTURES[0].sha256],
        [PICTURES[0].sha256],
        [],
        [PICTURES[1].sha256, PICTURES[0].sha256],
    ]
    assert len({id(placed.picture) for own in batch.pictures for placed in own}) == 2
    assert not build_step_batch([arrived[1]], [0], version=3, num_minibatches=1).pictures


def test_a_kept_inbox_gives_the_pictures_back(tmp_path: Any) -> None:
    kept = group([("given", 1), ("picture", 2), ("generated", 2)])
    InboxStore(tmp_path).write(kept)
    assert [shown(each) for each in InboxStore(tmp_path).read()] == [shown(kept)]


def forged(change: Any) -> list[Trajectory | CodecError]:
    """A sound trajectory, one whose message `change` altered, and another sound one, as they are decoded."""
    sound = group([("given", 3), ("picture", 0), ("generated", 2)], [("given", 3), ("picture", 0), ("picture", 1)])
    message = taken_apart(replace(sound, rollout_id=name) for name in "abc")
    change(message.entries[1], message.columns[1])
    return decode_each(message.frames())


def spoil(meta: dict[str, Any], columns: dict[str, np.ndarray]) -> None:
    columns["pictures"][60] ^= 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (spoil, "SHA-256"),
        (lambda meta, _: meta["pictures"]["prompt"][0].__setitem__(0, 5), "ends at position"),
        (lambda meta, _: meta["pictures"]["prompt"][0].__setitem__(1, 0), "Expected `int` >= 1"),
        (lambda meta, _: meta["pictures"]["prompt"][0].__setitem__(2, 7), "beyond the 2"),
        (lambda meta, _: meta["pictures"]["samples"].__setitem__(0, [[0, 1, 0]]), "the policy generated"),
        (lambda meta, _: meta["pictures"]["samples"].pop(), "are of 1 samples"),
        (lambda meta, _: meta["pictures"]["contents"].pop(), "trajectory.pictures has"),
        (lambda meta, _: meta["pictures"]["contents"][0].__setitem__(1, 1 << 40), "trajectory.pictures has"),
        (lambda meta, _: meta.pop("pictures"), "trajectory.pictures has"),
    ],
)
def test_a_forged_picture_refuses_its_trajectory_alone(change: Any, why: str) -> None:
    first, second, third = forged(change)
    assert isinstance(first, Trajectory)
    assert isinstance(third, Trajectory)
    assert isinstance(second, CodecError)
    assert why in str(second)


def test_a_picture_stands_at_given_tokens_only() -> None:
    sound = sample_of([("given", 1), ("picture", 0), ("generated", 2)])
    for wrong in (PlacedPicture(4, 2, PICTURES[0]), PlacedPicture(6, 2, PICTURES[0])):
        with pytest.raises(ValueError, match=r"Sample\.pictures"):
            replace(sound, pictures=(wrong,))
