from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from asyncrl.data.datasets import load_dataset
from asyncrl.data.files import FileDataset
from asyncrl.plugins.rewards.math_answer import math_answer_reward

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("field", ["prompt", "question", "problem"])
def test_each_prompt_field_is_read_and_other_fields_are_kept(tmp_path: Path, field: str) -> None:
    path = write(tmp_path / "data.jsonl", [{field: "1+1?", "answer": "2", "level": 3}])
    row = FileDataset(path=str(path)).row(0)
    assert (row["prompt"], row["answer"], row["level"]) == ("1+1?", "2", 3)


def test_the_template_surrounds_the_prompt(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [{"question": "1+1?", "unit": "apples"}])
    dataset = FileDataset(path=str(path), prompt_template="Q: {prompt} ({unit})\nA:")
    assert dataset.row(0)["prompt"] == "Q: 1+1? (apples)\nA:"


def test_a_held_out_share_splits_the_prompts_without_overlap(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [{"prompt": f"p{i}"} for i in range(400)])
    train = load_dataset(str(path), {"held_out_share": 0.25}, "train", 1)
    held_out = load_dataset(str(path), {"held_out_share": 0.25}, "held_out", 1)
    prompts = [{dataset.row(i)["prompt"] for i in range(len(dataset))} for dataset in (train, held_out)]
    assert not prompts[0] & prompts[1]
    assert len(prompts[0] | prompts[1]) == 400
    assert 60 <= len(held_out) <= 140


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (b"{not json", "one object per line"),
        (b"[1]", "one object per line"),
        (b'{"answer": "2"}', "prompt, question, problem, messages: add one"),
        (b'{"prompt": 3}', "prompt, question, problem, messages: add one"),
        (b'{"prompt": ""}', "prompt, question, problem, messages: add one"),
        (b'{"prompt": "caf\xe9"}', "save the file as UTF-8"),
        (b'{"prompt": "caf\\ud83d?"}', "half of a pair of surrogates, after .*caf'; write the whole character"),
        (
            b'{"prompt": "a", "answer": ["b", {"c": "d\\uDE00"}]}',
            "half of a pair of surrogates, after .*d'; write the whole",
        ),
    ],
)
def test_a_bad_line_is_named_by_file_and_number_with_what_to_do(tmp_path: Path, line: bytes, advice: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"data\.jsonl:2 .*{advice}"):
        FileDataset(path=str(path))


def test_a_template_with_a_field_that_a_line_has_not_names_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [{"prompt": "a", "unit": "m"}, {"prompt": "b"}])
    with pytest.raises(ValueError, match=r"data\.jsonl:2 does not fit prompt_template='\{prompt\} \{unit\}'"):
        FileDataset(path=str(path), prompt_template="{prompt} {unit}")


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "fine"}\n')
    assert FileDataset(path=str(path)).row(0)["prompt"] == "fine"


@pytest.mark.parametrize("kind", ["missing", "folder", "locked", "pipe"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data.jsonl"
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    if kind == "locked":
        path.touch(mode=0o000)
        if os.access(path, os.R_OK):
            pytest.skip("this user may read every file")
    with pytest.raises(ValueError, match=r"data\.jsonl cannot be read \(.*\): give a file"):
        FileDataset(path=str(path))


def test_a_whole_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "caf\\ud83d\\ude00?"}\n')
    assert FileDataset(path=str(path)).row(0)["prompt"] == "caf\N{GRINNING FACE}?"


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no rows: write one JSON object per line"):
        FileDataset(path=str(path))


def test_demonstrations_come_from_the_first_completion_field(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [{"prompt": "a", "completion": "b", "answer": "c"}, {"prompt": "d"}])
    dataset = FileDataset(path=str(path))
    assert dataset.demonstration(dataset.row(0)) == "b"
    with pytest.raises(ValueError, match="completion"):
        dataset.demonstration(dataset.row(1))


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the shared GSM8K files are not here")
def test_gsm8k_loads_and_every_reference_solution_earns_its_reward() -> None:
    dataset = FileDataset(path=str(GSM8K / "test.jsonl"))
    assert len(dataset) > 1000
    assert all(math_answer_reward(row, row["answer"]) == 1.0 for row in map(dataset.row, range(len(dataset))))


def test_an_empty_column_is_passed_over_where_another_holds_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": null, "question": "2+2?"}\n{"prompt": "", "messages": [], "problem": "3"}\n'
    )
    rows = FileDataset(path=str(tmp_path / "rows.jsonl"))
    assert [rows.row(number)["prompt"] for number in range(2)] == ["2+2?", "3"]


@pytest.mark.parametrize("value", ["null", "[1]", '{"a": 1}', "NaN"])
def test_what_is_neither_text_nor_a_number_is_put_into_no_prompt_and_is_no_demonstration(
    tmp_path: Path, value: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "2+2?", "input": {value}, "answer": {value}}}\n')
    with pytest.raises(ValueError, match=r"a field is .*, which is neither text nor a number"):
        FileDataset(path=str(tmp_path / "rows.jsonl"), prompt_template="{prompt} {input}")
    if value != "[1]":  # a list is messages
        rows = FileDataset(path=str(tmp_path / "rows.jsonl"))
        with pytest.raises(ValueError, match="give each row an answer"):
            rows.demonstration(rows.row(0))
