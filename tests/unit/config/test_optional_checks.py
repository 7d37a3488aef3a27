from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.optional_checks import optional_problems
from asyncrl.config.setting import ChoiceConfig, Dtype
from asyncrl.trainer.settings import AttentionImplementation, KeptOn, OptimizerName

UNKNOWN = ChoiceConfig(name="nowhere")


def changed(settings: dict[str, Any]) -> ExperimentConfig:
    """The default experiment with these settings, and no model of its own."""
    config = ExperimentConfig()
    for name, value in settings.items():
        group, _, field = name.rpartition(".")
        setattr(attrgetter(group)(config), field, value)
    return config


@pytest.mark.parametrize(
    ("asks", "beside"),
    [
        ({"algorithm.advantage": UNKNOWN}, {}),
        ({"model.attn_implementation": AttentionImplementation.flash_attention_2}, {"trainer.device": "cpu"}),
        ({"model.publish_dtype": Dtype.float32}, {"model.dtype": Dtype.bfloat16}),
        ({"moe.replay_routing": True}, {}),
        ({"optimizer.muon_lr": 1.0}, {}),
        ({"optimizer.name": OptimizerName.muon}, {"trainer.engine": "sharded"}),
        ({"profile.steps": [10**9]}, {}),
        ({"rollout.filters": [UNKNOWN]}, {}),
        ({"rollout.shaping": [UNKNOWN]}, {}),
        ({"trainer.activations_on": KeptOn.host}, {"trainer.gradient_checkpointing": False}),
        ({"trainer.compile": True}, {"trainer.engine": "sharded"}),
        ({"trainer.train_offset": 5}, {}),
    ],
    ids=lambda settings: next(iter(settings), ""),
)
def test_a_setting_asks_for_its_check_by_itself(asks: dict[str, Any], beside: dict[str, Any]) -> None:
    """Else it is checked only where another setting asks for the same module."""
    (setting,) = asks
    assert list(optional_problems(changed(beside))) == [], "nothing beside it asks"
    assert any(setting.rpartition(".")[0] in message for message in optional_problems(changed(asks | beside)))


def test_the_path_of_a_model_alone_asks_for_no_check(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.config.optional_checks.import_module", None)
    assert list(optional_problems(changed({"model.path": str(llama_dir)}))) == []
    with pytest.raises(TypeError, match="not callable"):
        list(optional_problems(changed({"moe.replay_routing": True})))
