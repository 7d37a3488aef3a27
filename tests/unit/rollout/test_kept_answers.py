"""Answers of an evaluation are kept as samples of training are, each worker's share in files of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from asyncrl.api import Sample
from asyncrl.observe.samples import answer_files, read_samples, step_of, trajectories
from asyncrl.rollout.episode import Answer
from asyncrl.rollout.kept_answers import KeptAnswers

GB = 10**9


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def answer(text: str, right: bool | None = None, reward: float = 0.0, version: int = 3, turns: float = 2.0) -> Answer:
    """One to the prompt `?`."""
    generated = np.arange(len(text) + 1) > 0
    sample = Sample(
        tokens=np.array([ord(char) for char in f"?{text}"], np.int32),
        loss_mask=generated.astype(np.uint8),
        behave_logprobs=np.where(generated, -0.5, 0.0).astype(np.float32),
        versions=np.where(generated, version, -1).astype(np.int32),
        reward=reward,
        reward_parts={"exact": reward},
    )
    return Answer([sample], right, {"agent/turns": turns})


def kept(folder: Path, every: int = 1, max_bytes: int = GB, index: int = 0, workers: int = 1) -> KeptAnswers:
    return KeptAnswers(folder, every, max_bytes, decode, index=index, workers=workers)


async def test_each_answer_is_a_row_with_its_set_version_row_member_and_scores(tmp_path: Path) -> None:
    await kept(tmp_path).keep(
        "maths", 3, {0: [answer("a", True, 1.0), answer("b", False, turns=3.0)], 4: [answer("c")]}
    )
    (file,) = answer_files(tmp_path)
    assert (file.parent.name, step_of(file)) == ("maths", 3)
    rows = list(read_samples([file]))
    assert [(row["set"], row["step"], row["order"], row["episode"]) for row in rows] == [
        ("maths", 3, 0, 0),
        ("maths", 3, 0, 1),
        ("maths", 3, 4, 0),
    ]
    assert [row["prompt"] for row in rows] == ["maths-0", "maths-0", "maths-4"]
    assert [(row["total_reward"], row["reward_parts"], row["right"]) for row in rows] == [
        (1.0, {"exact": 1.0}, True),
        (0.0, {"exact": 0.0}, False),
        (0.0, {"exact": 0.0}, None),
    ]
    assert [row["text"] for row in rows] == ["?a", "?b", "?c"]
    assert {row["staleness"] for row in rows} == {None}, "nothing was trained"
    assert [made.metrics for _, made in trajectories(rows)] == [{"agent/turns": turns} for turns in (2.0, 3.0, 2.0)]


async def test_only_every_nth_row_of_the_set_is_kept(tmp_path: Path) -> None:
    await kept(tmp_path, every=2, index=1, workers=3).keep("maths", 0, {row: [answer("a")] for row in (1, 4, 7, 10)})
    assert [row["order"] for row in read_samples(answer_files(tmp_path))] == [4, 10]


async def test_the_oldest_answers_to_a_set_make_room_for_newer_ones_to_it(tmp_path: Path) -> None:
    keeps = kept(tmp_path, max_bytes=1)
    for version in (1, 2):
        for name in ("maths", "words"):
            await keeps.keep(name, version, {0: [answer("a")]})
    assert [(step_of(file), file.parent.name) for file in answer_files(tmp_path)] == [(2, "maths"), (2, "words")]


async def test_what_a_launch_that_went_further_had_kept_is_removed(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        for index in (0, 1):
            await kept(tmp_path, index=index, workers=2).keep("maths", version, {index: [answer("old")]})
    await kept(tmp_path).keep("maths", 2, {row: [answer("new")] for row in (0, 1)})
    assert [(row["step"], row["order"], row["text"]) for row in read_samples(answer_files(tmp_path))] == [
        (1, 0, "?old"),
        (1, 1, "?old"),
        (2, 0, "?new"),
        (2, 1, "?new"),
    ]


async def test_what_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "maths").write_text("a file where the folder would be")
    with caplog.at_level(logging.WARNING):
        await kept(tmp_path).keep("maths", 3, {0: [answer("a")]})
    assert "answers of version 3 to maths are not kept" in caplog.text


@pytest.mark.parametrize("name", ["step-000003.mine.parquet", "step-best.worker-9.parquet", "step-3.worker-x.parquet"])
async def test_a_file_with_a_foreign_name_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "maths").mkdir()
    foreign = tmp_path / "maths" / name
    foreign.write_text("notes")
    await kept(tmp_path).keep("maths", 3, {0: [answer("a")]})
    assert foreign.read_text() == "notes"
    assert len(list((tmp_path / "maths").iterdir())) == 2, "the answers were written beside it"
