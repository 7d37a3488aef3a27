"""A RolloutWorker reads the rows that the launcher read, or says that the data changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config.run_dir import DATA_RECORD_FILE
from asyncrl.config.setting import ConfigError
from asyncrl.data.datasets import DataRecord
from asyncrl.data.files import FileDataset
from asyncrl.rollout.user_code.prompts import check_same_data


@pytest.mark.parametrize(("left", "message"), [(3, None), (2, "data.jsonl:2 is the last line with a row of training")])
def test_a_file_that_was_cut_off_since_it_was_checked_is_refused(
    tmp_path: Path, left: int, message: str | None
) -> None:
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": str(n)}) for n in range(3)]
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(lines))
    DataRecord.of(FileDataset(path=str(file))).write(tmp_path / DATA_RECORD_FILE)
    file.write_text("\n".join(lines[:left]))
    read = tmp_path / DATA_RECORD_FILE, FileDataset(path=str(file)), str(file)
    if message is None:
        check_same_data(*read)
        return
    with pytest.raises(ConfigError, match=message) as caught:
        check_same_data(*read)
    assert "the data changed while the run started" in str(caught.value)


def test_a_file_that_was_cut_off_within_a_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"prompt": "1+1=", "answer": "2"}\n{"prompt": "caf\xc3')
    with pytest.raises(ValueError, match=r"data\.jsonl:2 is not UTF-8"):
        FileDataset(path=str(file))
    file.write_bytes(b'{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+')
    with pytest.raises(ValueError, match=r"data\.jsonl:2 is not JSON"):
        FileDataset(path=str(file))
