"""Every block of docs/data.md is accepted and does what is said."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.data.files import FileDataset
from asyncrl.launch.before_start.data import check_data
from asyncrl.launch.before_start.setting_checks import validate
from asyncrl.master.data.order import ConfiguredOrder
from asyncrl.rollout.user_code.prompts import load_train_set
from asyncrl.trainer.messages import RolloutRecord

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.S)


@pytest.mark.parametrize("block", [text for kind, text in BLOCKS if kind == "yaml"])
def test_settings_are_accepted_and_load_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"task": f"{i}+1?", "reward_model": {"ground_truth": str(i + 1)}} for i in range(6)]
    Path("data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("other.jsonl").write_text(json.dumps({"prompt": "hello"}))
    Path("order.py").write_text("\n".join(text for kind, text in BLOCKS if kind == "python"))
    Path("mine.yaml").write_text(f"defaults: [async_ppo, _self_]\nfileroot: {tmp_path}\n{block}")
    config = load_experiment("mine", [], tmp_path)
    assert isinstance(config, ExperimentConfig)
    validate(config)
    check_data(config, tmp_path)
    data = load_train_set(config)
    rollouts = [
        RolloutRecord(str(n), f"e0-{n}", n, 0, 0, {0: 1}, (2,), (1,), (1.0 - n,), (False,), (0,)) for n in (0, 1)
    ]
    if (order := config.buffer.order).path:
        order.timeout_s = 120.0  # of a busy machine
        assert asyncio.run(ConfiguredOrder(order).ranks(rollouts, 0)) == {"0": 1.0, "1": 0.0}
    if config.dataset.sources:
        sources = [data.row(index)["source"] for index in range(len(data))]
        assert (sources.count("maths"), sources.count("chat")) == (6, 2)
    elif config.dataset.fields:
        assert (data.row(2)["prompt"], data.row(2)["answer"]) == ("2+1?", "3")
    else:
        assert config.dataset.chat_template_args == {"enable_thinking": False}


def test_rows_are_read(tmp_path: Path) -> None:
    text = next(text for kind, text in BLOCKS if kind == "json")
    (tmp_path / "data.jsonl").write_text(text)
    data = FileDataset(path=str(tmp_path / "data.jsonl"))
    assert [type(data.row(index)["prompt"]) for index in range(2)] == [str, list]
