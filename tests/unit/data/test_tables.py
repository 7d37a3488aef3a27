"""Parquet files, folders of files, and folders that `datasets` saved."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.datasets import DataRecord, load_dataset
from asyncrl.data.files import FileDataset

ROWS: list[dict[str, Any]] = [
    {"question": f"{i}+1?", "reward_model": {"ground_truth": str(i + 1), "style": "rule"}} for i in range(7)
]
FIELDS = {"prompt": "question", "answer": "reward_model.ground_truth"}


def save(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """Parquet by its name, else what `Dataset.save_to_disk` writes: Arrow streams and their list."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table, path = pyarrow.Table.from_pylist(rows), folder / name
    if name.endswith(".parquet"):
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, path, row_group_size=3)
        return path
    path.mkdir()
    files = [f"data-0000{part}-of-00002.arrow" for part in range(2)]
    for file, part in zip(files, (table.slice(0, 4), table.slice(4)), strict=True):
        with pyarrow.OSFile(str(path / file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(part)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": file} for file in files]}))
    (path / "dataset_info.json").write_text("{}")
    return path


@pytest.mark.parametrize("name", ["rows.parquet", "saved"])
def test_columns_are_read_in_order_under_the_names_asked_for(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, name, ROWS)
    dataset = load_dataset(str(path), {"fields": FIELDS}, "train", 0)
    rows = [dataset.row(index) for index in range(len(dataset))]
    assert [(row["prompt"], row["answer"]) for row in rows] == [(f"{i}+1?", str(i + 1)) for i in range(7)]


def test_messages_of_a_table_lose_what_it_fills_up_with(tmp_path: Path) -> None:
    conversation = [{"role": "user", "content": "a", "name": None}, {"role": "tool", "content": "b", "name": "f"}]
    path = save(tmp_path, "rows.parquet", [{"messages": conversation}])
    assert FileDataset(path=str(path)).row(0)["prompt"] == [{"role": "user", "content": "a"}, conversation[1]]


def test_a_row_that_changed_is_named_on_resume(tmp_path: Path) -> None:
    record = DataRecord.of(FileDataset(path=str(save(tmp_path, "rows.parquet", ROWS))))
    changed = [*ROWS[:4], {**ROWS[4], "question": "9+1?"}, *ROWS[5:]]
    assert record.difference(FileDataset(path=str(save(tmp_path, "rows.parquet", ROWS))), "x") is None
    found = record.difference(FileDataset(path=str(save(tmp_path, "rows.parquet", changed))), "x")
    assert found is not None
    assert "rows.parquet:5 is not what it was" in found


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, "rows.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"rows\.parquet cannot be read .* whole Parquet"):
        FileDataset(path=str(path))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("state.json", "{cut", r"state\.json cannot be read \(.*: save the dataset with save_to_disk again"),
        ("state.json", "{}", r"state\.json is not what save_to_disk writes, it has no _data_files"),
        ("dataset_dict.json", "[]", r"dataset_dict\.json is not what save_to_disk writes, it has no splits"),
    ],
)
def test_a_list_of_files_that_is_cut_off_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        FileDataset(path=str(tmp_path))


def test_a_column_of_text_that_is_none_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    broken = pyarrow.array([b"a", b"\xff"], pyarrow.binary()).cast(pyarrow.string(), safe=False)
    parquet.write_table(pyarrow.table({"prompt": broken}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"rows\.parquet has text that is not UTF-8 .* save it as UTF-8"):
        FileDataset(path=str(tmp_path / "rows.parquet"))


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"rows\.parquet needs the package pyarrow: pip install 'asyncrl\[data\]'"):
        FileDataset(path=str(tmp_path / "rows.parquet"))


def test_a_folder_of_files_is_read_by_name_and_of_several_sets_one_is_chosen(tmp_path: Path) -> None:
    for split in ("train", "test"):
        folder = tmp_path / split
        folder.mkdir()
        for part in (1, 0):
            (folder / f"{part}.jsonl").write_text(json.dumps({"prompt": f"{split}{part}"}) + "\n")
    with pytest.raises(ValueError, match=r"several sets of files .* choose some by args\.files"):
        FileDataset(path=str(tmp_path))
    dataset = FileDataset(path=str(tmp_path), files="train/*")
    assert [dataset.row(i)["prompt"] for i in range(len(dataset))] == ["train0", "train1"]
    assert dataset.location(1) == f"{tmp_path}/train/1.jsonl:1"
    with pytest.raises(ValueError, match=r"no data files that args\.files='dev/\*' names"):
        FileDataset(path=str(tmp_path), files="dev/*")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"holds the splits train, test: give the folder of one, .*/train"):
        FileDataset(path=str(tmp_path))


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({"question": "x", "reward_model": "y"}))
    with pytest.raises(ValueError, match=r"rows\.jsonl:2 has no 'reward_model\.ground_truth', which dataset\.fields"):
        FileDataset(path=str(path), fields=FIELDS)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([{"role": "assistant", "content": "a"}], "ends with the role 'assistant'"),
        ([{"role": "user"}], "message 0 has no text under 'content'"),
        ([{"role": "user", "content": [{"type": "audio", "audio": "x.wav"}]}], "sounds and videos are not supported"),
        (["a"], "message 0 is not an object with a role"),
    ],
)
def test_messages_that_no_answer_can_follow_are_refused(tmp_path: Path, messages: list[Any], why: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1 has no messages under 'messages': .*{why}"):
        FileDataset(path=str(path))
