"""Adapters on disk are peft's, and the embedded engine serves them merged with their base, whatever it had before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, OPTConfig, PreTrainedModel

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.models.ranks import Ranks
from asyncrl.trainer.messages import Publish as PublishRequest
from asyncrl.trainer.model.lora import adapter_config, add_adapters
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.rank.training_rank import TrainingRank, Versions
from asyncrl.trainer.settings import LoraConfig, LoraPublish
from asyncrl.weights.adapters import read_adapters
from asyncrl.weights.loading import read_checkpoint
from asyncrl.weights.manifest import WeightUpdateError, are_adapters, read_manifest, verify
from asyncrl.weights.publishing import SharedFiles, publish
from asyncrl.weights.transports.base import TrainerEnd

RANK, ALPHA = 4, 24.0
BASES = ["qwen_dir", "llama_dir", "gpt2_dir", "opt_dir"]
Publish = Callable[..., Path]


@pytest.fixture
def publish_adapters(
    config: ExperimentConfig, make_rank: Callable[[ExperimentConfig], TrainingRank], tmp_path: Path
) -> Publish:
    """Publishes adapters with random values of the model in a folder, as the trainer does."""

    def make(
        model_dir: Path,
        version: int,
        dtype: str = "float32",
        targets: list[str] | None = None,
        publishes: LoraPublish = LoraPublish.auto,
    ) -> Path:
        config.model.path, config.model.dtype, config.model.lora.publish = str(model_dir), Dtype(dtype), publishes
        config.model.lora.rank, config.model.lora.alpha = RANK, ALPHA
        config.model.lora.targets = targets or ["all-linear"]
        policy = make_rank(config).policy("actor")
        torch.manual_seed(version)
        for name, parameter in policy.network.named_parameters():  # type: ignore[attr-defined]
            if "lora_" in name:
                parameter.data.normal_(0, 0.3)
        specs = policy.published_specs()
        beside = SharedFiles(policy.model_config)
        if publishes is not LoraPublish.merged:
            beside = SharedFiles(adapter_config(config.model.lora, str(model_dir), specs, policy.model_config))
        return publish(policy, tmp_path / "weights", role="actor", version=version, ranks=Ranks(), shared=beside)

    return make


def engine_of(folder: Path, dtype: str = "float32") -> tuple[GenerationEngine, PreTrainedModel]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return GenerationEngine(model, model_path=str(folder)), model


def update(engine: GenerationEngine, folder: Path, version: str) -> None:
    future = engine.update_weights(str(folder), version)
    while engine.step():
        pass
    future.result(timeout=300.0)
    assert engine.weight_version == version


def expected(base: Path, folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """By hand: base + (alpha / rank) B A in fp32, then rounded."""
    weights = {name: tensor.to(dtype) for name, tensor in read_checkpoint(base).items()}
    found = read_checkpoint(folder)
    for name, a in found.items():
        if name.endswith("lora_A.weight"):
            layer = name.removeprefix("base_model.model.").replace("lora_A.", "")
            b = found[name.replace("lora_A", "lora_B")]
            product = b.float() @ a.float()
            if ".h." in layer:  # GPT-2's
                product = product.T
            weights[layer] = (weights[layer].float() + ALPHA / RANK * product).to(dtype)
    return weights


def is_served(model: PreTrainedModel, weights: dict[str, Tensor]) -> bool:
    state = model.state_dict()
    return all(torch.equal(state[name], tensor) for name, tensor in weights.items())


@pytest.fixture(scope="session")
def gpt2_dir(saved_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of another name, which keep their weights transposed."""
    config = GPT2Config(vocab_size=17, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    return saved_model(tmp_path_factory.mktemp("gpt2"), config)


@pytest.fixture(scope="session")
def opt_dir(saved_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Linear layers outside of the numbered ones: `project_in` and `project_out`."""
    config = OPTConfig(
        vocab_size=17,
        hidden_size=32,
        ffn_dim=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=16,
        max_position_embeddings=128,
    )
    return saved_model(tmp_path_factory.mktemp("opt"), config)


@pytest.mark.parametrize("base", BASES)
def test_all_linear_is_what_it_is_in_peft(base: str, request: pytest.FixtureRequest) -> None:
    config = AutoConfig.from_pretrained(request.getfixturevalue(base))
    mine, theirs = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    add_adapters(mine.base_model, LoraConfig(rank=RANK))
    adapted = get_peft_model(theirs, PeftConfig(r=RANK, target_modules="all-linear")).base_model.model
    names = {name for name, _ in adapted.named_parameters()}
    assert any(".lora_A." in name for name in names)
    assert {name for name, _ in mine.named_parameters()} == names


@pytest.mark.parametrize("base", BASES)
def test_a_version_is_a_small_folder_that_peft_loads(
    base: str, publish_adapters: Publish, request: pytest.FixtureRequest
) -> None:
    model_dir: Path = request.getfixturevalue(base)
    folder = publish_adapters(model_dir, 1)
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    ]
    manifest = read_manifest(folder)
    assert set(manifest.files) == {"adapter_config.json", "adapter_model.safetensors"}
    assert all(name.startswith("base_model.model.") for name in manifest.tensors)
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        before = plain(tokens).logits
        loaded = PeftModel.from_pretrained(plain, folder)
        with_adapters = loaded(tokens).logits
        merged = loaded.merge_and_unload()
    assert (with_adapters - before).abs().max() > 1e-2
    for name, tensor in expected(model_dir, folder, torch.float32).items():
        assert torch.allclose(merged.state_dict()[name], tensor, atol=1e-6), name


@pytest.mark.parametrize("base", [*BASES, "tiny_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_version_is_what_a_server_makes_of_the_adapters(
    base: str, dtype: str, publish_adapters: Publish, request: pytest.FixtureRequest
) -> None:
    model_dir: Path = request.getfixturevalue(base)
    targets = ["q_proj"] if base == "tiny_moe" else None
    adapters = publish_adapters(model_dir, 1, dtype, targets)
    weights = expected(model_dir, adapters, getattr(torch, dtype))
    shutil.rmtree(adapters)
    merged = read_checkpoint(publish_adapters(model_dir, 1, dtype, targets, LoraPublish.merged))
    assert merged.keys() == weights.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in weights.items())
    engine, model = engine_of(model_dir, dtype)
    update(engine, adapters, "1")
    assert all(torch.equal(model.state_dict()[name], merged[name]) for name in model.state_dict().keys() & merged)


def test_a_version_is_written_anew_where_it_holds_the_other_kind(publish_adapters: Publish, llama_dir: Path) -> None:
    folder = publish_adapters(llama_dir, 1)
    assert are_adapters(folder)
    assert publish_adapters(llama_dir, 1, publishes=LoraPublish.merged) == folder
    assert not are_adapters(folder)
    assert verify(folder).tensors.keys() == read_checkpoint(llama_dir).keys()


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_transports_from_memory_hold_merged_weights(
    transport: str,
    publish_adapters: Publish,
    config: ExperimentConfig,
    make_rank: Callable[[ExperimentConfig], TrainingRank],
    llama_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config.model.path, config.model.lora.rank, config.model.lora.alpha = str(llama_dir), RANK, ALPHA
    config.manager.weight_transport = transport
    held: dict[str, Tensor] = {}

    class Holding(TrainerEnd):
        def hold(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
            held.update({name: tensor.clone() for name, tensor in tensors})

    rank = make_rank(config)
    trained = dict(rank.policy("actor").network.named_parameters())  # type: ignore[attr-defined]
    name = "model.layers.0.self_attn.q_proj"
    a, b = (trained[f"{name}.lora_{part}.default.weight"].data.normal_() for part in "AB")
    versions = Versions(config, tmp_path, World(), rank, None, torch.device("cpu"))
    versions.to_servers = Holding()
    folder = versions.publish(PublishRequest("actor", 0, to_disk=False))
    base = read_checkpoint(llama_dir)
    assert read_manifest(folder).tensors.keys() == held.keys() == base.keys()
    base[f"{name}.weight"] += ALPHA / RANK * (b @ a)
    assert all(torch.equal(held[name], tensor) for name, tensor in base.items()), "the other adapters are untrained"


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_serves_base_and_adapter_whatever_it_had_before(
    base: str, dtype: str, publish_adapters: Publish, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model_dir: Path = request.getfixturevalue(base)
    kind = getattr(torch, dtype)
    every = [publish_adapters(model_dir, version, dtype) for version in (1, 2)]
    few = publish_adapters(model_dir, 3, dtype, ["c_attn" if base == "gpt2_dir" else "q_proj"])
    engine, model = engine_of(model_dir, dtype)
    for version, folder in enumerate([*every, few, every[0]]):
        update(engine, folder, str(version))
        assert is_served(model, expected(model_dir, folder, kind)), f"v{version}"
    other = tmp_path / "other"
    AutoModelForCausalLM.from_config(model.config).save_pretrained(other)
    update(engine, other, "7")
    assert not is_served(model, expected(model_dir, few, kind))
    update(engine, few, "8")
    assert is_served(model, expected(model_dir, few, kind)), "nothing of the other model stays"
    update(engine, model_dir, "9")
    assert is_served(model, {name: tensor.to(kind) for name, tensor in read_checkpoint(model_dir).items()})


def test_the_trainers_types_rounding_is_served(publish_adapters: Publish, llama_dir: Path) -> None:
    """An engine in fp32 serves the base in the type that the trainer held it in."""
    folder = publish_adapters(llama_dir, 1, "bfloat16", ["q_proj"])
    engine, model = engine_of(llama_dir)
    update(engine, folder, "1")
    adapters = read_adapters(folder)
    name = "model.layers.0.self_attn.q_proj.weight"
    a, b = adapters.layers[name]
    base = read_checkpoint(llama_dir)[name].bfloat16().float()
    assert torch.equal(model.state_dict()[name], base + ALPHA / RANK * (b.float() @ a.float()))


def test_what_does_not_fit_is_refused_by_name_and_nothing_changes(
    publish_adapters: Publish, llama_dir: Path, qwen_dir: Path, tmp_path: Path
) -> None:
    folder = publish_adapters(llama_dir, 1)
    moved = tmp_path / "moved"
    shutil.copytree(llama_dir, moved)
    renamed = {name.replace("model.layers", "model.blocks"): t for name, t in read_checkpoint(llama_dir).items()}
    engine, model = engine_of(llama_dir)
    untouched = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def refused(message: str, weights: Path = folder, server: GenerationEngine = engine) -> None:
        with pytest.raises(WeightUpdateError, match=message):
            server.update_weights(str(weights), "2")

    def changed(name: str, **values: object) -> Path:
        made = tmp_path / name
        shutil.copytree(folder, made)
        (made / "manifest.json").unlink()  # what others made has none
        described = json.loads((made / "adapter_config.json").read_text()) | values
        (made / "adapter_config.json").write_text(json.dumps(described))
        return made

    refused("use_rslora=True", changed("rs", use_rslora=True))
    refused("rank_pattern=", changed("pattern", rank_pattern={"q_proj": 2}))
    refused("of rank 8 they are", changed("rank", r=8))
    refused(r"has r=0", changed("none", r=0))
    refused("this server started with", changed("base", base_model_name_or_path=str(qwen_dir)))
    broken = changed("broken")
    (broken / "adapter_config.json").write_text("{")
    refused("is not a configuration of adapters", broken)
    lone = changed("lone")
    save_file({"base_model.model.x.lora_A.weight": torch.ones(RANK, 2)}, lone / "adapter_model.safetensors")
    refused("which is no A with a B", lone)
    unknown = changed("unknown")
    tensors = {f"base_model.model.x.lora_{n}.weight": torch.ones(RANK, RANK) for n in "AB"}
    save_file(tensors, unknown / "adapter_model.safetensors")
    refused(r"has no 'x.weight' \(1 missing\)", unknown)
    wide = changed("wide")
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{layer}.lora_{n}.weight": torch.ones(RANK, RANK) for n in "AB"}
    save_file(tensors, wide / "adapter_model.safetensors")
    refused(r"q_proj.weight is \[16, 16\] in the base model, its adapter makes \[4, 4\]", wide)
    elsewhere, _ = engine_of(moved)
    (moved / "model.safetensors").unlink()
    save_file(renamed, moved / "model.safetensors")
    refused("its weight names differ", changed("moved-base", base_model_name_or_path=str(moved)), elsewhere)
    assert is_served(model, untouched)
    assert engine.weight_version == "default"


def test_adapters_that_were_read_before_another_update_are_refused(
    publish_adapters: Publish, llama_dir: Path, tmp_path: Path
) -> None:
    folder = publish_adapters(llama_dir, 1, targets=["q_proj"])
    engine, model = engine_of(llama_dir)
    other = tmp_path / "other"
    AutoModelForCausalLM.from_config(model.config).save_pretrained(other)
    whole, late = engine.update_weights(str(other), "1"), engine.update_weights(str(folder), "2")
    while engine.step():
        pass
    whole.result(timeout=300.0)
    with pytest.raises(WeightUpdateError, match="load them again"):
        late.result(timeout=300.0)
    assert engine.weight_version == "1"
