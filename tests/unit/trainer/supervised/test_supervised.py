from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_with_min_lr_schedule_with_warmup

from asyncrl.config.setting import Device
from asyncrl.data.demonstrations import DemonstrationFormat, LazyRows, demonstration_batches
from asyncrl.data.files import FileDataset
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import CharTokenizer, load_tokenizer
from asyncrl.launch.commands.export.policy import export
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.trainer.settings import LoraConfig, LoraPublish, OptimizerName
from asyncrl.trainer.supervised import checks, supervised_loop
from asyncrl.trainer.supervised.checks import check
from asyncrl.trainer.supervised.settings import (
    SFTCheckpointConfig,
    SFTConfig,
    SFTEvalConfig,
    SFTModelConfig,
    SFTTrainerConfig,
    run_dir_of,
)
from asyncrl.trainer.supervised.supervised_loop import ProgressCallback, SFTPhase, SFTProgress, make_base_model

TINY: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
FAST = {"batch_size": 8, "warmup_steps": 2, "optimizer": OptimizerName.muon, "adamw_lr": 2e-2}


def make(
    out_dir: Path,
    *,
    steps: int = 4,
    phases: list[SFTPhase] | None = None,
    progress: ProgressCallback | None = None,
    path: str | None = None,
    **settings: Any,
) -> Path:
    model = SFTModelConfig(path, {} if path else dict(TINY))
    config = SFTConfig(**{**FAST, "model": model, "threads": 1, **settings})
    if phases is None:
        phases = [SFTPhase(ArithmeticDataset(num_rows=50, max_numbers=3), steps)]
    return make_base_model(config, out_dir, phases=phases, progress=progress)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path).state_dict())


def test_the_model_is_saved_in_the_hugging_face_layout_with_its_tokenizer(tmp_path: Path) -> None:
    path = make(tmp_path / "base")
    assert {"config.json", "model.safetensors", "tokenizer.json", "training.json"} <= {p.name for p in path.iterdir()}
    model = AutoModelForCausalLM.from_pretrained(path)
    assert (model.config.eos_token_id, model.config.vocab_size) == (1, 17)
    assert isinstance(load_tokenizer(path), CharTokenizer)
    assert AutoTokenizer.from_pretrained(path).encode("1+2=") == load_tokenizer(path).encode("1+2=")
    assert json.loads((path / "training.json").read_text(encoding="utf-8"))["steps"] == [4]


def test_nothing_but_the_model_is_left_beside_it(tmp_path: Path) -> None:
    make(tmp_path / "base")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    first, again, other = make(tmp_path / "a"), make(tmp_path / "b"), make(tmp_path / "c", seed=2)
    assert all(torch.equal(tensor, weights(again)[name]) for name, tensor in weights(first).items())
    assert not all(torch.equal(tensor, weights(other)[name]) for name, tensor in weights(first).items())


def test_training_leaves_the_global_random_state_and_thread_count_alone(tmp_path: Path) -> None:
    before = (torch.random.get_rng_state(), torch.get_num_threads())
    make(tmp_path / "base")
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


def test_progress_counts_over_all_phases_and_ends_at_zero_seconds(tmp_path: Path) -> None:
    seen: list[SFTProgress] = []
    dataset = ArithmeticDataset(num_rows=50, max_numbers=3)
    make(tmp_path / "base", phases=[SFTPhase(dataset, 2), SFTPhase(dataset, 3)], progress=seen.append)
    assert [(report.step, report.total) for report in seen] == [(step, 5) for step in range(1, 6)]
    assert seen[-1].eta_s == 0.0


@pytest.mark.parametrize("optimizer", OptimizerName)
def test_training_lowers_the_loss(tmp_path: Path, optimizer: OptimizerName) -> None:
    losses: list[float] = []
    rates = {"optimizer": optimizer, "lr": 1e-2, "adamw_lr": 2e-2}
    make(tmp_path / "base", steps=80, progress=lambda report: losses.append(report.loss), **rates)
    assert losses[-1] < 0.88 * losses[0]


@pytest.mark.parametrize("optimizer", OptimizerName)
def test_the_cut_into_micro_batches_does_not_change_the_loss_or_the_gradient_step(
    tmp_path: Path, optimizer: OptimizerName
) -> None:
    phases = [SFTPhase(ArithmeticDataset(num_rows=50), 2)]
    results = []
    for budget in (60, 100_000):
        rates = {"optimizer": optimizer, "tokens_per_micro_batch": budget}
        made = make(tmp_path / str(budget), phases=phases, **rates)
        results.append((losses_of(made), torch.cat([tensor.flatten() for tensor in weights(made).values()])))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=1e-4)


def test_training_without_a_bound_on_the_gradient_learns_and_stops_at_one_that_is_not_finite(tmp_path: Path) -> None:
    start = make(tmp_path / "start")
    tuned = make(tmp_path / "tuned", steps=1, path=str(start), warmup_steps=0, max_grad_norm=0.0)
    assert not torch.equal(weights(tuned)["model.norm.weight"], weights(start)["model.norm.weight"])
    model = AutoModelForCausalLM.from_pretrained(start)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.inf)
        model.lm_head.weight.mul_(1e30)
    model.save_pretrained(start)
    with pytest.raises(FloatingPointError, match="norm is nan; lower lr and adamw_lr"):
        make(tmp_path / "ruined", steps=1, path=str(start))


def test_a_users_jsonl_continues_a_saved_model(tmp_path: Path) -> None:
    base = make(tmp_path / "base")
    data = tmp_path / "data.jsonl"
    data.write_text(
        '{"prompt": "1+1=", "completion": "#2"}\n{"prompt": "2+2=", "completion": "#4"}\n', encoding="utf-8"
    )
    phases = [SFTPhase(FileDataset(path=str(data)), 3)]
    tuned = make(tmp_path / "tuned", phases=phases, path=str(base))
    assert weights(tuned).keys() == weights(base).keys()
    assert not torch.equal(weights(tuned)["model.norm.weight"], weights(base)["model.norm.weight"])


def test_a_run_without_steps_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 steps"):
        make(tmp_path / "base", phases=[])
    assert not list(tmp_path.iterdir())


def test_a_pretrained_model_and_an_architecture_exclude_each_other(tmp_path: Path) -> None:
    config = SFTConfig(model=SFTModelConfig(str(make(tmp_path / "base")), TINY))
    (message,) = check(config)
    assert "not both" in message


def test_demonstrations_end_with_the_end_token_and_visit_every_row_once_an_epoch() -> None:
    dataset, tokenizer = ArithmeticDataset(num_rows=12), CharTokenizer()
    rows = LazyRows(dataset, DemonstrationFormat(PromptFormat(tokenizer, None)))
    batches = list(demonstration_batches(rows, batch_size=4, steps=3, seed=1))
    items = [item for batch in batches for item in batch]
    assert {tokenizer.decode(item.token_ids) for item in items} == {
        row["prompt"] + dataset.demonstration(row) for row in map(dataset.row, range(12))
    }
    for item in items:
        assert item.token_ids[-1] == tokenizer.eos_token_id
        prompt = item.loss_mask.index(True)
        assert tokenizer.decode(item.token_ids[:prompt])[-1] == "="
        assert all(item.loss_mask[prompt:])


MUON = {"optimizer": OptimizerName.muon}
ENGINE = {"optimizer": OptimizerName.adamw, "adamw_lr": 1e-2}


def losses_of(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Killed(BaseException):
    """The process ends here, with nothing told."""


@pytest.mark.parametrize("optimizer", [ENGINE, MUON], ids=["adamw", "muon"])
def test_a_run_that_was_killed_goes_on_with_the_same_losses_to_the_same_weights(
    optimizer: dict[str, Any], tmp_path: Path
) -> None:
    """Within the second phase; what was not in a checkpoint is done again."""
    dataset = ArithmeticDataset(num_rows=50, max_numbers=3)
    phases = [SFTPhase(dataset, 5), SFTPhase(dataset, 6)]
    whole = make(tmp_path / "whole", phases=phases, **optimizer)
    reported: list[SFTProgress] = []

    def until_9(report: SFTProgress) -> None:
        reported.append(report)
        if report.step == 9:
            raise Killed

    settings = {**optimizer, "checkpoint": SFTCheckpointConfig(interval=3)}
    with pytest.raises(Killed):
        make(tmp_path / "cut", phases=phases, progress=until_9, **settings)
    assert not (tmp_path / "cut").exists()
    cut = make(tmp_path / "cut", phases=phases, progress=reported.append, **settings)
    assert [report.step for report in reported] == [*range(1, 10), *range(7, 12)]
    assert losses_of(cut) == losses_of(whole)
    assert len(losses_of(cut)) == 11
    assert all(torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(cut).items())
    assert not run_dir_of(tmp_path / "whole").exists(), "without checkpoints nothing is left of it"


@pytest.mark.parametrize("name", OptimizerName)
def test_the_engine_takes_the_steps_of_a_plain_loop_on_padded_rows(name: OptimizerName, tmp_path: Path) -> None:
    """Packed or not, the steps are those of torch's optimizers on the mean loss of the batch's answer tokens."""
    base, dataset = make(tmp_path / "base"), ArithmeticDataset(num_rows=50, max_numbers=3)
    rates = {"optimizer": name, "adamw_lr": 3e-3, "warmup_steps": 1, "min_lr_share": 0.5}
    tuned = make(tmp_path / "tuned", phases=[SFTPhase(dataset, 4)], path=str(base), **rates)

    model = AutoModelForCausalLM.from_pretrained(base).eval()
    muons = [each for each in model.model.layers.parameters() if each.ndim == 2 and name == OptimizerName.muon]
    rest = [each for each in model.parameters() if not any(each is other for other in muons)]
    optimizers: list[Any] = [torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0)]
    if muons:
        optimizers.append(torch.optim.Muon(muons, lr=7e-3, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    schedules = [get_cosine_with_min_lr_schedule_with_warmup(each, 1, 4, min_lr_rate=0.5) for each in optimizers]
    rows = LazyRows(dataset, DemonstrationFormat(PromptFormat(CharTokenizer(), None)))
    losses = []
    for batch in demonstration_batches(rows, batch_size=8, steps=4, seed=1):
        tokens = sum(item.answer_length for item in batch)
        total = torch.zeros(())
        for item in batch:
            logits = model(torch.tensor([item.token_ids[:-1]])).logits[0]
            learnt = torch.tensor(item.loss_mask[1:])
            wanted = torch.tensor(item.token_ids[1:])[learnt]
            total = total + F.cross_entropy(logits[learnt], wanted, reduction="sum")
        (total / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.append((total / tokens).item())
    assert losses_of(tuned) == pytest.approx(losses, abs=1e-5)
    rounding = 1e-4 if muons else 1e-5  # Muon orthogonalises in bfloat16
    for key, tensor in weights(tuned).items():
        torch.testing.assert_close(tensor, model.state_dict()[key], rtol=1e-3, atol=rounding)


def test_adapters_are_trained_and_merged_and_a_step_of_the_run_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = make(tmp_path / "base")
    model = SFTModelConfig(str(base), {}, lora=LoraConfig(rank=4, alpha=8.0, targets=["q_proj", "down_proj"]))
    settings = {**ENGINE, "adamw_lr": 5e-2, "model": model, "checkpoint": SFTCheckpointConfig(interval=4, keep=9)}
    phases = [SFTPhase(ArithmeticDataset(num_rows=8), 20)]  # all in each batch: the losses are of the same rows
    tuned = make(tmp_path / "tuned", phases=phases, **settings)
    changed = {name for name, tensor in weights(tuned).items() if not torch.equal(tensor, weights(base)[name])}
    layer = "model.layers.0"
    assert changed == {f"{layer}.self_attn.q_proj.weight", f"{layer}.mlp.down_proj.weight"}
    assert losses_of(tuned)[-1] < losses_of(tuned)[0] - 0.02
    assert isinstance(load_tokenizer(tuned), CharTokenizer)

    run = run_dir_of(tuned)
    assert export(run, None, tmp_path / "newest") == 20
    assert all(torch.equal(tensor, weights(tmp_path / "newest")[name]) for name, tensor in weights(tuned).items())
    assert export(run, 8, tmp_path / "eighth") == 8
    assert not torch.equal(*(weights(at)[f"{layer}.mlp.down_proj.weight"] for at in (tuned, tmp_path / "eighth")))
    export(run, 8, tmp_path / "adapter", adapter=True)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_the_held_out_loss_is_that_of_its_rows_after_the_step(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "completion": f"{n + 1}"}) + "\n" for n in range(8)))
    evaluated = SFTEvalConfig(interval=1, path=str(rows))
    reports: list[SFTProgress] = []
    make(tmp_path / "made", phases=[SFTPhase(FileDataset(path=str(rows)), 4)], progress=reports.append, eval=evaluated)
    for before, after in pairwise(reports):  # all rows are in each batch
        assert before.held_out_loss == pytest.approx(after.loss, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({**MUON, "trainer": SFTTrainerConfig(parallel="d2")}, "trainer.parallel=d2: optimizer=muon"),
        (
            {**MUON, "model": SFTModelConfig(architecture=TINY, lora=LoraConfig(rank=2))},
            "model.lora.rank=2: optimizer=muon",
        ),
        (
            {**MUON, "model": SFTModelConfig(path="/a/model")},
            "at rates that ruin a pretrained one; use optimizer=adamw",
        ),
        ({**MUON, "adamw_lr": 0.0}, "adamw_lr=0: Muon's rate follows its schedule, so lr=0.007 would be 0 too"),
        ({"lr": 1e-4}, "lr=0.0001: it is Muon's rate, and optimizer=adamw has another; set adamw_lr=0.0001"),
        (
            {"model": SFTModelConfig(architecture=TINY, lora=LoraConfig(rank=2, publish=LoraPublish.merged))},
            "model.lora.publish='merged': no servers load the result",
        ),
        ({**ENGINE, "trainer": SFTTrainerConfig(parallel="x2")}, "trainer.parallel='x2'"),
        (
            {**ENGINE, "trainer": SFTTrainerConfig(parallel="d2"), "device": Device.cuda},
            "trainer.parallel='d2': 2 ranks want a GPU each and this machine shows 1",
        ),
        (
            {**ENGINE, "trainer": SFTTrainerConfig(parallel="d2")},
            "this machine shows 1; use a layout of that many ranks",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    settings: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "count_gpus", lambda: 1)
    assert any(expected in message for message in check(SFTConfig(**settings)))


def test_the_defaults_lower_the_loss_of_a_pretrained_model_a_little_and_do_not_ruin_it(tmp_path: Path) -> None:
    defaults = SFTConfig()
    names = ("optimizer", "lr", "adamw_lr", "warmup_steps", "max_grad_norm", "min_lr_share")
    base = make(tmp_path / "base", steps=60, optimizer=OptimizerName.adamw, adamw_lr=2e-2)
    phases = [SFTPhase(ArithmeticDataset(num_rows=8), 30)]  # all in each batch: the losses are of the same rows
    given = {name: getattr(defaults, name) for name in names}
    losses = losses_of(make(tmp_path / "tuned", phases=phases, path=str(base), **given))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_ranks_on_gpus_see_one_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_loop, "visible_gpus", lambda: ("4", "GPU-a", "7"))
    started: list[str | None] = []

    class Process:
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            started.append(env.get("CUDA_VISIBLE_DEVICES"))

        def wait(self, limit_s: float = 0.0) -> None: ...

        def kill(self) -> None: ...

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(supervised_loop.subprocess, "Popen", Process)
    for device in (Device.auto, Device.cpu):
        config = SFTConfig(device=device, trainer=SFTTrainerConfig(parallel="d3"))
        with supervised_loop.other_ranks(config, ["config", "out"], tmp_path / "run"):
            pass
    assert started == ["GPU-a", "7", None, None]  # this process sees all, and takes the first
