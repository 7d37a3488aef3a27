"""The whole system with adapters: what is served is what is trained, across a restart, and it can be exported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from asyncrl.launch.__main__ import main
from asyncrl.weights.loading import read_checkpoint

pytestmark = pytest.mark.slow


def test_adapters_train_are_served_exactly_go_on_and_are_exported(
    start_run: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """They begin whole on one rank, and go on over two."""
    settings = {
        "model__lora__rank": 4,
        "model__lora__alpha": 16,
        "max_head_offpolicyness": 0,
        "optimizer__lr": 3e-2,
        "checkpoint__interval": 1,
        "eval__interval": 0,
    }
    first = start_run(total_train_steps=2, trainer__engine="flat", **settings)
    assert first.wait() == 0, first.output + first.logs()
    second = start_run(total_train_steps=4, trainer__engine="sharded", trainer__parallel="d2", **settings)
    assert second.wait() == 0, second.output + second.logs()

    rows = second.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["staleness/max"] == 0
        assert row["ppo/behave_imp_weight_max"] == pytest.approx(1.0, abs=1e-3)
        assert row["ppo/behave_kl"] < 1e-6
    log = (second.run_dir / "logs" / "gserver_manager-0.log").read_text()
    assert {"1", "2", "3"} <= set(re.findall(r"agrees with the trainer on v(\d)", log)), log
    assert "does not serve" not in log

    weights = second.run_dir / "weights" / "actor"
    newest = weights / "v4"
    assert sorted(path.name for path in newest.glob("*.safetensors")) == ["adapter_model.safetensors"]
    assert main(["export", str(second.run_dir), str(tmp_path / "out")]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    base = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    changed = [
        name for name, tensor in base.state_dict().items() if not torch.equal(exported.state_dict()[name], tensor)
    ]
    adapted = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in read_checkpoint(newest)}
    assert sorted(changed) == sorted(f"{layer}.weight" for layer in adapted)
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        plain, merged = base(tokens).logits, exported(tokens).logits
        adapters = PeftModel.from_pretrained(base, newest)(tokens).logits
    assert (merged - plain).abs().max() > 1e-2
    assert torch.allclose(merged, adapters, atol=1e-4)
