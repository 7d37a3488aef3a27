"""Kept samples: files, tables, and what `show` prints of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.launch.commands import show
from asyncrl.launch.commands.eval import write_answers
from asyncrl.observe import dashboard
from asyncrl.observe.metrics.sample_tables import SampleTables, as_markdown
from asyncrl.observe.samples import (
    answer_files,
    forget_after,
    pictures_of,
    read_samples,
    rows_of,
    sample_files,
    schema,
    step_of,
    trajectories,
    write_samples,
)
from asyncrl.verify.audit import tables as audit_of_kept
from tests import every_field

GIB = 1 << 30


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def sample(text: str, versions: str, reward: float, **more: object) -> Sample:
    """`versions` has for each character the version that generated it, or a dot where none did."""
    generated = np.array([mark != "." for mark in versions])
    return Sample(
        tokens=np.array([ord(char) for char in text], np.int32),
        loss_mask=generated.astype(np.uint8),
        behave_logprobs=np.where(generated, -0.5, 0.0).astype(np.float32),
        versions=np.array([-1 if mark == "." else int(mark) for mark in versions], np.int32),
        reward=reward,
        **more,  # type: ignore[arg-type]
    )


def rollout(number: int = 0) -> Trajectory:
    turn_rewards = np.array([0, 0, 0, 0.25, 0, 0], np.float32)
    samples = [
        sample(
            "ab=c!d", "..34.4", 1.0, token_rewards=turn_rewards, reward_parts={"exact": 1.0}, metrics={"turns": 2.0}
        ),
        sample("ab=\x1b\x9b", "..344", 0.0, truncated=True, episode=1),
    ]
    return Trajectory(f"r{number}", f"e0-{number}", number, samples, {"time/reward_s": 0.125})


def write(folder: Path, step: int, *numbers: int, writer: str = "head-0", max_bytes: int = GIB) -> Path:
    scores = {"prox_logprobs": np.full(11, -0.25, np.float32)}
    rows = [row for number in numbers for row in rows_of(rollout(number), step, decode, scores)]
    return write_samples(folder, step, writer, rows, max_bytes)


def test_what_is_written_is_read_again_as_it_was(tmp_path: Path) -> None:
    file = write(tmp_path, 5, 0, 1)
    read = list(trajectories(read_samples([file])))
    assert [(step, one.rollout_id, one.prompt_id, one.order) for step, one in read] == [
        (5, "r0", "e0-0", 0),
        (5, "r1", "e0-1", 1),
    ]
    for (_, one), number in zip(read, (0, 1), strict=True):
        assert one.metrics == {"time/reward_s": 0.125}
        for got, wanted in zip(one.samples, rollout(number).samples, strict=True):
            for name in ("tokens", "loss_mask", "behave_logprobs", "versions"):
                np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))
                assert getattr(got, name).dtype == getattr(wanted, name).dtype
            assert (got.reward, got.truncated, got.episode) == (wanted.reward, wanted.truncated, wanted.episode)
            assert (got.reward_parts, got.metrics) == (wanted.reward_parts, wanted.metrics)
            assert (got.token_rewards is None) == (wanted.token_rewards is None)
            assert got.total_reward == wanted.total_reward


def test_every_field_of_a_trajectory_and_its_samples_is_kept_but_experts_and_frames(tmp_path: Path) -> None:
    file = write_samples(tmp_path, 6, "head-0", rows_of(every_field.TRAJECTORY, 6, decode, {}), GIB)
    ((_, read),) = trajectories(read_samples([file]))
    assert every_field.differences(read, every_field.TRAJECTORY, but=["routing", "frames"]) == []


def test_the_page_has_every_column_with_its_type() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "samples.md").read_text(encoding="utf-8")
    reported: dict[str, str] = {}
    for names, kinds in re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", page.partition("\n## The files\n")[2], re.MULTILINE):
        columns = re.findall(r"`(\w+)`", names)
        types = [kinds] if kinds.startswith("map") else kinds.split(", ")
        reported |= zip(columns, types * len(columns) if len(types) == 1 else types, strict=True)
    kept = {field.name: str(field.type).replace("item: ", "") for field in schema()}
    assert reported == {name: re.sub(r"struct<.*", "struct>", kind) for name, kind in kept.items()}


def test_a_row_tells_turns_versions_and_three_log_probabilities(tmp_path: Path) -> None:
    first, second = read_samples([write(tmp_path, 5, 0)])
    assert first["text"] == "ab=c!d"
    assert [(part["generated"], part["version"], part["text"]) for part in first["segments"]] == [
        (False, None, "ab"),
        (True, 3, "="),
        (True, 4, "c"),
        (False, None, "!"),
        (True, 4, "d"),
    ]
    assert (first["segments"][2]["start"], first["staleness"]) == (3, 1)
    assert first["behave_logprobs"] == [0, 0, -0.5, -0.5, 0, -0.5]
    assert first["prox_logprobs"] == [-0.25] * 6
    assert first["ref_logprobs"] is None
    assert (first["reward"], first["total_reward"], first["reward_parts"]) == (1.0, 1.25, {"exact": 1.0})
    assert (second["sample"], second["episode"], second["truncated"]) == (1, 1, True)


def test_the_oldest_files_of_a_writer_make_room(tmp_path: Path) -> None:
    size = write(tmp_path, 1, 0).stat().st_size
    write(tmp_path, 1, 0, writer="head-1")
    for step in (2, 3, 4):
        write(tmp_path, step, 0, max_bytes=int(2.5 * size))
    assert [step_of(file) for file in sample_files(tmp_path) if ".head-0." in file.name] == [3, 4]
    assert [step_of(file) for file in sample_files(tmp_path) if ".head-1." in file.name] == [1]
    write(tmp_path, 5, 0, max_bytes=1)
    assert [step_of(file) for file in sample_files(tmp_path) if ".head-0." in file.name] == [5], "the newest stays"


def test_steps_that_a_launch_forgets_lose_their_samples(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, 0)
    forget_after(tmp_path, 2, "head-0")
    assert [step_of(file) for file in sample_files(tmp_path)] == [1, 2]


def test_files_whose_names_have_no_step_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "maths"
    kept = write(folder, 1, 0)
    copies = [folder / "step-best.head-0.parquet", folder / "step-00000001 (1).head-0.parquet"]
    for copy in copies:
        copy.write_bytes(kept.read_bytes())
    assert sample_files(folder) == answer_files(tmp_path) == [kept]
    newest = write(folder, 2, 0, max_bytes=1)
    assert sample_files(folder) == [newest]
    forget_after(folder, 1, "head-0")
    assert sample_files(folder) == []
    assert all(copy.exists() for copy in copies)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, 1, 0)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"step-00000001\.head-0\.parquet is not a file of samples"):
        list(read_samples([file]))


def test_tables_show_each_step_once(tmp_path: Path) -> None:
    tables = SampleTables(tmp_path, size=3, after=1)
    for step in (1, 2, 3):
        write(tmp_path, step, 0, 1)
    ((step, table),) = tables.new(before=3)
    assert (step, len(table)) == (2, 3)
    assert table[0] == ["e0-0", "0", "1.25", "-2", "ab=c!d"]
    assert tables.new(before=3) == []
    assert [step for step, _ in tables.new(before=4)] == [3]


def test_a_file_that_cannot_be_read_costs_no_other_table_and_is_tried_once_more(tmp_path: Path) -> None:
    tables = SampleTables(tmp_path, size=3, after=0)
    files = [write(tmp_path, step, 0) for step in (1, 2, 3)]
    whole = [file.read_bytes() for file in files]
    for file in files[:2]:
        file.write_bytes(b"")
    assert [step for step, _ in tables.new(before=4)] == [3]
    files[0].write_bytes(whole[0])
    assert [step for step, _ in tables.new(before=4)] == [1]
    files[1].write_bytes(whole[1])
    assert tables.new(before=4) == [], "step 2 had its second try"


def test_a_table_keeps_text_from_being_markup() -> None:
    assert as_markdown([["e0-0", "0", "1", "", "a|b\n<b>*x*"]]).splitlines()[2] == (
        "| e0-0 | 0 | 1 |  | a&#124;b<br>&#60;b&#62;&#42;x&#42; |"
    )


GOLDEN = """\
step 5  e0-0  sample 0  reward 1.25 (exact 1)  staleness 1  3 of 6 tokens generated  turns 2
  log-probabilities: behaviour -0.500, proximal -0.250
ab[v3|=][v4|c]![v4|d]

step 5  e0-0  sample 1  reward 0  staleness 1  3 of 5 tokens generated  cut off
  log-probabilities: behaviour -0.500, proximal -0.250
ab[v3|=][v4|\\x1b\\x9b]

"""


@pytest.mark.parametrize(
    ("group", "shown"),
    [("judge", ["judge", "judge/right"]), ("judge/right", ["judge/right"]), ("", [""]), ("past", [])],
)
def test_show_chooses_a_comparison_group_or_all_groups_of_a_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], group: str, shown: list[str]
) -> None:
    samples = [sample("ab", ".1", 1.0, group=each) for each in ("", "judge", "judge/right")]
    write_samples(tmp_path, 2, "head-0", rows_of(Trajectory("r0", "e0-0", 0, samples, {}), 2, decode, {}), GIB)
    assert show.main([str(tmp_path), "--group", group], "asyncrl") == 0
    heads = [line.split("  ") for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [head[3] if head[3].startswith("judge") else "" for head in heads] == shown


def test_show_prints_samples_plainly_where_nobody_sees_colours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "samples", 5, 0)
    assert show.main([str(tmp_path)], "asyncrl") == 0
    assert capsys.readouterr().out == GOLDEN


@pytest.mark.parametrize("no_color", [False, True])
def test_versions_have_colours_on_a_terminal_unless_no_color_is_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_color: bool
) -> None:
    write(tmp_path / "samples", 5, 0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    assert show.main([str(tmp_path), "-n", "1"], "asyncrl") == 0
    out = capsys.readouterr().out
    assert ("\x1b[35m=" in out) != no_color, "version 3"
    assert ("[v3|=]" in out) == no_color


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--step", "2:"], [(2, 0), (2, 1), (3, 0), (3, 1)]),
        (["--step", "1", "--reward", "1:"], [(1, 0)]),
        (["--reward", ":0.5", "-n", "2"], [(1, 1), (2, 1)]),
        (["--newest-first", "-n", "1"], [(3, 0)]),
        (["--prompt", "e0-7"], []),
        (["--staleness=-2", "--rollout", "r0"], [(2, 0), (2, 1)]),
    ],
)
def test_show_chooses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], shown: list[tuple[int, int]]
) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, 0)
    assert show.main([str(tmp_path), *options], "asyncrl") == 0
    heads = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [(int(words[1]), int(words[4])) for words in heads] == shown


@pytest.mark.parametrize(
    ("options", "message"),
    [(["-n", "-1"], "0 means all"), (["--reward", "1:0.5"], "'1:0.5' is empty"), (["--step", "nan"], "is empty")],
)
def test_show_refuses_what_chooses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        show.main([str(tmp_path), *options], "asyncrl")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert show.main([str(tmp_path / "nowhere")], "asyncrl") == 2
    assert "nowhere: no such folder" in capsys.readouterr().err


def test_show_refuses_what_has_no_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show.main([str(tmp_path)], "asyncrl") == 2
    assert "samples.every=1" in capsys.readouterr().err


def answers(folder: Path, name: str, version: int) -> Path:
    extra = {"set": name, "right": True, "staleness": None}
    rows = [row | extra for row in rows_of(rollout(version), version, decode, {})]
    return write_samples(folder / name, version, "worker-0", rows, GIB)


def test_show_prints_answers_of_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, version in (("maths", 3), ("words", 3), ("maths", 4)):
        answers(tmp_path / "eval_samples", name, version)
    shown = {}
    for options in ("--eval", "--eval maths", "--eval maths --step 4 --reward :0.5"):
        assert show.main([str(tmp_path), *options.split()], "asyncrl") == 0
        shown[options] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("version ")]
    assert shown["--eval maths"][0] == (
        "version 3  e0-3  answer 0  reward 1.25 (exact 1)  right  3 of 6 tokens generated  turns 2"
    )
    assert [line.split()[1] for line in shown["--eval"]] == ["3", "3", "3", "3", "4", "4"]
    assert len(shown["--eval maths"]) == 4
    (last,) = shown["--eval maths --step 4 --reward :0.5"]
    assert last.startswith("version 4  e0-4  answer 1  reward 0  right")


@pytest.mark.parametrize(("rollout_id", "shown"), [("maths-0-v3", [0, 1]), ("maths-0-v3-1", [1]), ("maths-0", [])])
def test_show_prints_one_answer_or_all_answers_to_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rollout_id: str, shown: list[int]
) -> None:
    for number in (0, 1):
        rows = [row | {"set": "maths", "rollout": f"maths-0-v3-{number}"} for row in rows_of(rollout(3), 3, decode, {})]
        write_samples(tmp_path / "eval_samples" / "maths", 3, f"worker-{number}", rows[number : number + 1], GIB)
    assert show.main([str(tmp_path), "--eval", "--rollout", rollout_id], "asyncrl") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("version ")]
    assert [int(line.partition("answer ")[2].split()[0]) for line in lines] == shown


def test_show_names_the_sets_that_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show.main([str(tmp_path), "--eval"], "asyncrl") == 2
    assert "holds no answers of evaluations" in capsys.readouterr().err
    answers(tmp_path / "eval_samples", "maths", 3)
    assert show.main([str(tmp_path), "--eval", "math"], "asyncrl") == 2
    assert "--eval math: no such set, did you mean 'maths'? there are maths" in capsys.readouterr().err


def test_answers_are_written_as_lines_by_row_and_member_with_their_scores(tmp_path: Path) -> None:
    for name, version in (("maths", 0), ("words", 0)):
        answers(tmp_path / "kept", name, version)
    out = tmp_path / "answers.jsonl"
    assert write_answers(tmp_path / "kept", out, ["words", "none"]) == {"words": 2, "none": 0}
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert [first[name] for name in ("set", "row", "answer", "prompt", "completion")] == ["words", 0, 0, "ab", "=c!d"]
    assert [first[name] for name in ("reward", "reward_parts", "right", "generated_tokens")] == [
        1.25,
        {"exact": 1.0},
        True,
        3,
    ]
    assert (second["answer"], second["truncated"], second["reward"]) == (1, True, 0.0)


def test_pictures_are_kept_once_in_a_rollout_named_in_texts_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = Picture.from_array(np.full((20, 30, 3), 7, np.uint8))
    own = (PlacedPicture(1, 3, picture),)
    samples = [sample("a###b=c", ".....33", 1.0, pictures=own, episode=number) for number in range(4)]
    kept = Trajectory("r0", "e0-0", 0, [*samples, sample("ab", ".3", 0.0, episode=4)])
    file = write_samples(
        tmp_path, 3, "head-0", [*rows_of(kept, 3, decode, {}), *rows_of(rollout(1), 3, decode, {})], GIB
    )
    rows = list(read_samples([file]))
    name = str(picture)
    assert name == f"[picture 30x20 {picture.sha256[:8]}]"
    assert [each["text"] for each in rows[:5]] == [f"a{name}b=c"] * 4 + ["ab"]
    assert [segment["text"] for segment in rows[0]["segments"]] == ["a", name, "b", "=c"]
    assert [[each["data"] for each in row["pictures"]] for row in rows[:5]] == [
        [picture.data],
        [None],
        [None],
        [None],
        [],
    ]
    (_, found), (_, plain) = trajectories(rows)
    assert [each.pictures for each in found.samples] == [own] * 4 + [()]
    assert not plain.pictures
    assert show.main([str(tmp_path), "-n", "1"], "asyncrl") == 0
    assert f"a{name}b[v3|=c]" in capsys.readouterr().out
    with pytest.raises(ValueError, match="shows a picture whose bytes"):
        list(trajectories(rows[1:5]))
    shown = dashboard._sample(rows[0], decode)
    assert "".join(piece[0] for piece in shown["pieces"]) == f"a{name}b=c"
    assert dashboard._pictures(rows[1], pictures_of(rows)) == {"pictures": [picture.data_url]}
    assert dashboard._pictures(rows[4], pictures_of(rows)) == {}


def test_the_audit_takes_a_picture_for_a_segment_of_its_own(tmp_path: Path) -> None:
    picture = Picture.from_array(np.full((20, 30, 3), 7, np.uint8))
    shown = sample("a###b=c", ".....33", 1.0, pictures=(PlacedPicture(1, 3, picture),))
    write_samples(tmp_path, 4, "head-0", rows_of(Trajectory("r0", "e0-0", 0, [shown]), 4, decode, {}), GIB)
    (row,) = read_samples(sample_files(tmp_path))
    assert audit_of_kept._wrong_with(row) is None
    assert audit_of_kept._wrong_with({**row, "pictures": []}) == "segments are not those of its tokens"
