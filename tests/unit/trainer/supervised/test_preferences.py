"""Judged answers: losses and gradients are TRL's, layouts agree, the results load where they are used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from asyncrl.config.setting import ChoiceConfig
from asyncrl.data.demonstrations import JudgedAnswer
from asyncrl.data.tokenizers import CharTokenizer
from asyncrl.trainer.engines.flat import FlatLoader
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.settings import LoraConfig, OptimizerName
from asyncrl.trainer.supervised.checks import check
from asyncrl.trainer.supervised.objectives import engine_settings, make_objective
from asyncrl.trainer.supervised.settings import (
    SFTCheckpointConfig,
    SFTConfig,
    SFTDatasetConfig,
    SFTEvalConfig,
    SFTModelConfig,
    SFTPhaseConfig,
    run_dir_of,
)
from asyncrl.trainer.supervised.supervised_loop import SFTProgress, make_base_model
from tests.unit.trainer.supervised.trl_values import BETA, CENTRING, FILE, PAIRS, WEIGHTS, policy, reward_model

TRL = json.loads(FILE.read_text())
CPU = torch.device("cpu")
PARAMS: dict[str, dict[str, float]] = {
    "bradley_terry": {"centring": CENTRING},
    "dpo": {"beta": BETA},
    "ipo": {"beta": BETA},
    "kto": {"beta": BETA, **WEIGHTS},
}


def judged(prompt: list[int], answer: list[int], preferred: bool, margin: float) -> JudgedAnswer:
    return JudgedAnswer(
        prompt + answer, [False] * len(prompt) + [True] * len(answer), preferred=preferred, margin=margin
    )


BATCH = [judged(p, a, liked, m) for p, c, r, m in PAIRS for a, liked in ((c, True), (r, False))]


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("budget", [8, 4096])
def test_losses_gradients_and_metrics_are_trls(tmp_path: Path, name: str, budget: int) -> None:
    """Also where a pair's answers are in different micro-batches."""
    start = reward_model() if name == "bradley_terry" else policy()
    start.save_pretrained(tmp_path)
    loss = ChoiceConfig(name, dict(PARAMS[name]))
    config = SFTConfig(optimizer=OptimizerName.adamw, loss=loss, tokens_per_micro_batch=budget, max_grad_norm=0.0)
    objective = make_objective(config, engine_settings(config, tmp_path, 3), RankPosition(), CPU)
    if name != "bradley_terry":  # the reference is what the run begins with: move the policy away from it
        tensors, _ = objective.engine.state()
        moved = dict(policy(0.2).named_parameters())
        for key, tensor in tensors.items():
            if key.startswith("weights."):
                tensor.copy_(moved[key.removeprefix("weights.")].detach())
        objective.engine.load_state({"step": 0})
    found = objective.compute_gradients(BATCH)
    expected = TRL[name]
    assert found.loss == pytest.approx(expected["loss"], rel=2e-5)
    assert objective.engine.step(1e-3).grad_norm == pytest.approx(expected["grad_norm"], rel=2e-5)
    if name != "kto":
        assert found.accuracy == pytest.approx(expected["accuracy"])
        assert found.margin == pytest.approx(expected["margin"], rel=2e-5)
    else:
        assert expected["kl"] > 0.0
        assert found.accuracy is None


ROWS = [{"prompt": f"{a}+{b}=", "chosen": f"#{a + b}", "rejected": f"#{a + b};"} for a in range(10) for b in range(10)]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    architecture = {
        "model_type": "qwen2",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    config = SFTConfig(model=SFTModelConfig(architecture=architecture), phases=[SFTPhaseConfig(1)], batch_size=2)
    return make_base_model(config, folder / "base")


def settings(tmp_path: Path, base: Path, name: str, steps: int = 6, **more: Any) -> SFTConfig:
    rows = written(tmp_path / "pairs.jsonl", ROWS)
    given = {
        "optimizer": OptimizerName.adamw,
        "adamw_lr": 1e-2,
        "warmup_steps": 1,
        "batch_size": 8,
        "phases": [SFTPhaseConfig(steps)],
        "model": SFTModelConfig(str(base)),
        "dataset": SFTDatasetConfig(rows, args={"held_out_share": 0.2}),
        "eval": SFTEvalConfig(interval=steps),
        "loss": ChoiceConfig(name),
    }
    return SFTConfig(**{**given, **more})


def test_a_reward_model_learns_resumes_and_is_loaded_as_a_role_and_by_transformers(tmp_path: Path, base: Path) -> None:
    reported: list[SFTProgress] = []
    config = settings(tmp_path, base, "bradley_terry", steps=24, checkpoint=SFTCheckpointConfig(interval=8, keep=9))
    made = make_base_model(config, tmp_path / "judge", progress=reported.append)
    assert reported[0].loss == pytest.approx(0.6931472, abs=1e-6), "the new head is 0"
    assert reported[-1].held_out_accuracy is not None
    assert reported[-1].loss < 0.6
    row = json.loads((made / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"accuracy", "margin", "held_out_accuracy", "held_out_margin", "held_out_loss"} <= row.keys()

    # A run that was cut off after its second checkpoint ends with the same weights.
    run = run_dir_of(made)
    for path in (run / "checkpoints" / "v24", run / "weights" / "actor" / "v24"):
        import shutil

        shutil.rmtree(path)
    again: list[SFTProgress] = []
    make_base_model(config, tmp_path / "judge", progress=again.append)
    assert [report.step for report in again] == list(range(17, 25))
    assert again[-1].loss == reported[-1].loss

    classifier = AutoModelForSequenceClassification.from_pretrained(made)
    assert (type(classifier).__name__, classifier.config.num_labels) == ("Qwen2ForSequenceClassification", 1)
    tokens = CharTokenizer().encode("1+2=#3")
    with torch.no_grad():
        expected = classifier(torch.tensor([tokens])).logits.item()
    objective_settings = engine_settings(config, made, 1)
    role = FlatLoader(objective_settings, RankPosition(), CPU).reward_model(str(made))
    from asyncrl.trainer.supervised.objectives import step_batch

    scores = role.outputs(step_batch([JudgedAnswer(tokens, [False] * 6)], CPU))
    assert scores[-1].item() == pytest.approx(expected, abs=1e-5)
    assert expected != 0.0


@pytest.mark.parametrize(("name", "lora"), [("dpo", 0), ("ipo", 4), ("kto", 0)])
def test_policies_move_towards_what_is_preferred(tmp_path: Path, base: Path, name: str, lora: int) -> None:
    """With adapters the reference is the model without them."""
    if lora:
        pytest.importorskip("peft")
    reported: list[SFTProgress] = []
    model = SFTModelConfig(str(base), lora=LoraConfig(rank=lora, alpha=8.0))
    made = make_base_model(settings(tmp_path, base, name, model=model), tmp_path / "tuned", progress=reported.append)
    assert reported[0].margin == pytest.approx(0.0, abs=1e-9), "the policy is the reference"
    assert reported[-1].margin is not None
    assert reported[-1].margin > 0.0
    tuned, start = (load_file(folder / "model.safetensors") for folder in (made, base))
    assert tuned.keys() == start.keys()
    assert AutoModelForCausalLM.from_pretrained(made).config.vocab_size == 17


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"loss": ChoiceConfig("bradly_terry")}, "did you mean 'bradley_terry'?"),
        ({"loss": ChoiceConfig("dpo", {"betta": 1.0})}, "loss.params={'betta': 1.0}"),
        ({"loss": ChoiceConfig("cross_entropy", {"beta": 1.0})}, "cross_entropy has no parameters"),
        ({"loss": ChoiceConfig("dpo"), "optimizer": OptimizerName.muon}, "use optimizer=adamw"),
        ({"loss": ChoiceConfig("kto"), "batch_size": 1}, "batch_size to 2"),
        (
            {"loss": ChoiceConfig("bradley_terry"), "model": SFTModelConfig(lora=LoraConfig(rank=2))},
            "reward models are trained whole",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(more: dict[str, Any], expected: str) -> None:
    config = SFTConfig(**{"optimizer": OptimizerName.adamw, **more})
    assert any(expected in message for message in check(config))


def test_a_wrong_value_of_a_parameter_ends_the_run_before_its_first_step(tmp_path: Path, base: Path) -> None:
    reported: list[SFTProgress] = []
    config = settings(tmp_path, base, "dpo", loss=ChoiceConfig("dpo", {"beta": -1.0}))
    with pytest.raises(ValueError, match="beta is -1"):
        make_base_model(config, tmp_path / "tuned", progress=reported.append)
    assert not reported
