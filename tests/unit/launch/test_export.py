"""An exported folder is the published version, bit by bit, whether it comes from its folder or from a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import read_run_config, write_run_config
from asyncrl.config.setting import ChoiceConfig, Dtype
from asyncrl.launch.__main__ import main
from asyncrl.models.pictures import Pictures
from asyncrl.models.ranks import Ranks
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.engines.base import ValueEngine
from asyncrl.trainer.functions.model_functions import StatValues
from asyncrl.trainer.messages import SaveCheckpoint
from asyncrl.trainer.model.lora import adapter_config
from asyncrl.trainer.model.lora_checks import publishes_adapters
from asyncrl.trainer.rank.training_rank import TrainingRank
from asyncrl.trainer.settings import LoraPublish
from asyncrl.weights.loading import read_checkpoint
from asyncrl.weights.manifest import file_entry, read_manifest, write_manifest
from asyncrl.weights.publishing import SharedFiles, publish, tokenizer_assets
from tests.tiny_vlm import picture
from tests.vlm_batches import vlm_trajectories

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(
    config: ExperimentConfig,
    make_rank: Callable[[ExperimentConfig], TrainingRank],
    make_batch: Callable[..., StepBatch],
    run_step: Callable[..., dict[str, StatValues]],
    tmp_path: Path,
) -> MakeRun:
    """A run of two steps, each published and saved."""

    def make(
        dtype: str, lora_rank: int = 0, publishes: LoraPublish = LoraPublish.auto, batch: StepBatch | None = None
    ) -> Path:
        config.model.dtype, config.model.lora.rank, config.model.lora.publish = Dtype(dtype), lora_rank, publishes
        run = tmp_path / "exp" / "trial"
        run.mkdir(parents=True)
        write_run_config(config, run)
        rank = make_rank(config)
        policy = rank.policy("actor")
        base = str(config.model.path)
        shared = SharedFiles(policy.model_config, tokenizer_assets(Path(base)))
        if publishes_adapters(config):
            shared = SharedFiles(adapter_config(config.model.lora, base, policy.published_specs(), policy.model_config))
        for step in (1, 2):
            run_step(config, rank, make_batch(seed=step) if batch is None else batch)
            publish(policy, run / "weights", role="actor", version=step, ranks=Ranks(), shared=shared)
            path = run / "checkpoints" / f"v{step}"
            rank.save_checkpoint(SaveCheckpoint(str(path), step, {}))
            rank.disk_writer.commit(path, rank.disk_writer.share(path).result(60.0), keep=2, protected=())
        return run

    return make


def test_an_export_has_the_chat_template_that_the_run_was_trained_with(
    make_run: MakeRun, config: ExperimentConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    config.dataset.chat_template = str(own)
    run = make_run("float32")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == own.read_text()
    assert f"chat template: {own}\n" in capsys.readouterr().out
    own.unlink()
    assert main(["export", str(run), str(tmp_path / "later")]) == 0
    assert f"WARNING: no chat template: {own} is not there" in capsys.readouterr().out


def test_a_critic_is_exported_as_a_classifier_and_continued_from_it(
    config: ExperimentConfig,
    make_rank: Callable[[ExperimentConfig], TrainingRank],
    make_batch: Callable[..., StepBatch],
    run_step: Callable[..., dict[str, StatValues]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config.algorithm.graph, config.algorithm.advantage = "ppo", ChoiceConfig("gae")
    config.algorithm.critic.optimizer.lr = 1e-2
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    write_run_config(config, run)
    rank, batch = make_rank(config), make_batch()
    run_step(config, rank, batch)
    path = run / "checkpoints" / "v1"
    rank.save_checkpoint(SaveCheckpoint(str(path), 1, {}))
    rank.disk_writer.commit(path, rank.disk_writer.share(path).result(60.0), keep=2, protected=())
    values_T = critic_of(rank).outputs(batch)
    assert float(values_T.abs().max()) > 1e-3  # it was trained
    assert main(["export", str(run), str(out), "--policy", "critic"]) == 0
    assert "critic, its outputs before algorithm.critic.value_norm, after 1 steps" in capsys.readouterr().out
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert (model.config.architectures, model.config.num_labels) == (["Qwen2ForSequenceClassification"], 1)
    ends = (batch.starts_S + batch.lengths_S).tolist()
    for start, end in zip(batch.starts_S.tolist(), ends, strict=True):
        with torch.no_grad():
            score = model(input_ids=batch["tokens"][None, start:end].long()).logits
        torch.testing.assert_close(score.squeeze(), values_T[end - 1], rtol=0, atol=1e-6)
    config.algorithm.critic.path = str(out)
    torch.testing.assert_close(critic_of(make_rank(config)).outputs(batch), values_T, rtol=0, atol=1e-6)
    assert (out / "tokenizer_config.json").is_file()
    assert main(["export", str(run), str(tmp_path / "none"), "--policy", "critic", "--step", "7"]) == 1
    assert "has no checkpoint of step 7: a critic is only there" in capsys.readouterr().err


def critic_of(rank: TrainingRank) -> ValueEngine:
    engine = rank.engines["critic"]
    assert isinstance(engine, ValueEngine)
    return engine


@pytest.mark.parametrize(
    ("model", "dtype"), [("qwen_dir", "float32"), ("qwen_dir", "bfloat16"), ("tiny_moe", "float32")]
)
def test_what_is_exported_from_a_checkpoint_is_what_was_published(
    model: str,
    dtype: str,
    make_run: MakeRun,
    config: ExperimentConfig,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config.model.path = str(request.getfixturevalue(model))
    run = make_run(dtype)
    expected = read_checkpoint(run / "weights" / "actor" / "v1")
    shutil.rmtree(run / "weights" / "actor" / "v1")
    assert main(["export", str(run), "--step", "1", str(tmp_path / "out")]) == 0
    assert "the policy after 1 steps" in capsys.readouterr().out
    exported = read_checkpoint(tmp_path / "out")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
    assert all(exported[name].dtype == tensor.dtype for name, tensor in expected.items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    newest = read_checkpoint(run / "weights" / "actor" / "v2")
    assert any(not torch.equal(newest[name], tensor) for name, tensor in expected.items()), "two different versions"
    AutoTokenizer.from_pretrained(tmp_path / "out")
    assert not {"manifest.json", "logprob_probe.json"} & {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("kind", ["qwen2_vl", "gemma3"])
def test_a_model_with_pictures_is_exported_with_its_tower_and_what_reads_pictures_in(
    kind: str,
    lora_rank: int,
    make_run: MakeRun,
    config: ExperimentConfig,
    vlm_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = vlm_folder(kind)
    config.model.path, config.generation.context_length, config.trainer.ppo_minibatches = str(folder), 256, 1
    trajectories = [
        replace(each, samples=tuple(replace(one, reward=n % 2.0, episode=n) for n, one in enumerate(each.samples)))
        for each in vlm_trajectories(folder)
    ]
    batch = build_step_batch(trajectories, [0] * len(trajectories), version=0, num_minibatches=1)
    run = make_run("float32", lora_rank, LoraPublish.merged, batch)
    expected = read_checkpoint(run / "weights" / "actor" / "v1")
    shutil.rmtree(run / "weights" / "actor" / "v1")
    out = tmp_path / "out"
    assert main(["export", str(run), "--step", "1", str(out)]) == 0, capsys.readouterr().err
    exported, before = read_checkpoint(out), read_checkpoint(folder)
    assert exported.keys() == expected.keys() == before.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
    changed = {name for name, tensor in before.items() if not torch.equal(exported[name], tensor)}
    assert any("vis" in name for name in changed), sorted(changed)
    pictures = Pictures.of(AutoModelForImageTextToText.from_pretrained(out), out)
    assert pictures is not None
    assert pictures.ids.seen(picture(1)).rows > 0


def test_the_newest_published_version_is_exported_by_default(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("float32")
    shutil.rmtree(run / "checkpoints")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    expected, exported = read_checkpoint(run / "weights" / "actor" / "v2"), read_checkpoint(tmp_path / "out")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("source", ["published", "checkpoint"])
def test_adapters_are_merged_into_their_base(
    dtype: str, source: str, make_run: MakeRun, qwen_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(dtype, lora_rank=4)
    found = read_checkpoint(run / "weights" / "actor" / "v1")
    if source == "checkpoint":
        shutil.rmtree(run / "weights" / "actor" / "v1")
    assert main(["export", str(run), "--step", "1", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    kind = getattr(torch, dtype)
    expected = {name: tensor.to(kind) for name, tensor in read_checkpoint(qwen_dir).items()}
    base = dict(expected)
    for name, a in found.items():
        if ".lora_A." in name:
            layer = name.removeprefix("base_model.model.").replace(".lora_A", "")
            b = found[name.replace("lora_A", "lora_B")]
            expected[layer] = (base[layer].float() + 32.0 / 4 * (b.float() @ a.float())).to(kind)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == kind
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(base[name], tensor) for name, tensor in expected.items()), "they were trained"
    AutoTokenizer.from_pretrained(tmp_path / "out")
    assert main(["export", str(run), "--step", "1", "--adapter", str(tmp_path / "peft")]) == 0
    assert sorted(path.name for path in (tmp_path / "peft").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    adapters = read_checkpoint(tmp_path / "peft")
    assert all(torch.equal(adapters[name], tensor) for name, tensor in found.items())
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(qwen_dir), tmp_path / "peft")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_published_merged_is_exported_and_its_adapters_come_from_the_checkpoint(
    dtype: str, make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(dtype, lora_rank=4, publishes=LoraPublish.merged)
    merged = read_checkpoint(run / "weights" / "actor" / "v1")

    def exported(name: str, *options: str) -> dict[str, Tensor]:
        assert main(["export", str(run), "--step", "1", *options, str(tmp_path / name)]) == 0, capsys.readouterr().err
        return read_checkpoint(tmp_path / name)

    def same(found: dict[str, Tensor]) -> bool:
        return found.keys() == merged.keys() and all(torch.equal(found[name], merged[name]) for name in merged)

    assert same(exported("from-published"))
    exported("peft", "--adapter")
    base = AutoModelForCausalLM.from_pretrained(read_run_config(run).model.path, dtype=getattr(torch, dtype))
    by_peft = PeftModel.from_pretrained(base, tmp_path / "peft").merge_and_unload().state_dict()
    for name, tensor in merged.items():
        torch.testing.assert_close(by_peft[name], tensor, rtol=1e-2, atol=1e-2 if dtype == "bfloat16" else 1e-6)
    shutil.rmtree(run / "weights" / "actor" / "v1")
    assert same(exported("from-checkpoint")), "not the weights of v2, which is still published"
    shutil.rmtree(run / "checkpoints")
    assert main(["export", str(run), "--adapter", str(tmp_path / "none")]) == 1
    assert "no checkpoint of that step; leave --adapter out" in capsys.readouterr().err


def test_merging_needs_adapters_and_their_base(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = make_run("float32", lora_rank=4), tmp_path / "out"
    for version in (run / "weights" / "actor").glob("v*"):
        file = version / "adapter_config.json"
        described = json.loads(file.read_text()) | {"base_model_name_or_path": str(tmp_path / "gone")}
        file.unlink()  # a hard link to what other versions share
        file.write_text(json.dumps(described))
        manifest = read_manifest(version)
        entries = {**manifest.files, file.name: file_entry(file)}
        write_manifest(version, msgspec.structs.replace(manifest, files=entries))
    assert main(["export", str(run), str(out)]) == 1
    assert "gone' is not there; put it back there, or give --adapter" in capsys.readouterr().err
    assert not out.exists()
    assert main(["export", str(run), "--adapter", str(out)]) == 0


def test_a_run_without_adapters_has_none_to_export(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(make_run("float32")), "--adapter", str(tmp_path / "out")]) == 1
    assert "has no adapters of step 2: it trained all weights, or published them merged" in capsys.readouterr().err


def test_what_cannot_be_exported_is_said_with_what_there_is(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("float32")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "nowhere"), str(out)]) == 1
    assert "nowhere is not a run" in capsys.readouterr().err
    assert main(["export", str(run), "--step", "7", str(out)]) == 1
    reported = capsys.readouterr().err
    assert "nothing of step 7. Steps there are, published in" in reported
    assert reported.count("1, 2") == 2
    assert main(["export", str(run), str(run)]) == 1
    assert "exists; give a folder that does not" in capsys.readouterr().err
    damaged = next((run / "checkpoints" / "v1").glob("shard-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    shutil.rmtree(run / "weights" / "actor" / "v1")
    assert main(["export", str(run), "--step", "1", str(out)]) == 1
    assert "is damaged" in capsys.readouterr().err
    assert not out.exists()
