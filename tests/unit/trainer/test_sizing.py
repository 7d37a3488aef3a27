"""Counted parameters are the real model's, shards those that torch makes, activations those that autograd keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.config.setting import Dtype
from asyncrl.models.host_copies import upload
from asyncrl.models.transformers_internals import tower_parameters
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind, Block, Branches, Ints, blocks, lay_out
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.engines.flat import FlatOptimizer, FlatPolicyEngine
from asyncrl.trainer.engines.sharded.context_parallel import StreamPart, across_ranks
from asyncrl.trainer.model import layers as model_layers
from asyncrl.trainer.model.attention import PACKED, DeviceBlock
from asyncrl.trainer.model.layers import checkpoint_layers
from asyncrl.trainer.model.value_models import Critic
from asyncrl.trainer.parallel.placement import Coordinates, Layout, WorkerGrid
from asyncrl.trainer.settings import AttentionImplementation, OptimizerConfig
from asyncrl.trainer.sizing import (
    AttentionShape,
    MemoryNeed,
    Workload,
    count,
    layer_bytes_per_token,
    need,
    packed_shape,
    sized,
    total,
)

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 176,
    "vocab_size": 131,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "llama-untied": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "eos_token_id": 0},
    "gemma2": {"model_type": "gemma2", "head_dim": 16},
    "olmo2": {"model_type": "olmo2"},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 16},
}


def described(name: str, **changes: Any) -> dict[str, Any]:
    return BASE | MODELS[name] | changes


def real(name: str, **changes: Any) -> PreTrainedModel:
    """The model with memory behind every tensor."""
    settings = described(name, **changes)
    dtype = settings.pop("dtype", torch.float32)
    attention = settings.pop("attention", "eager")
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return model


def workload(engine: str = "sharded", dtype: str = "float32", tokens: int = 512) -> Workload:
    return Workload(engine, Dtype(dtype), AttentionImplementation.sdpa, tokens, 128)


@pytest.mark.parametrize("name", MODELS)
def test_the_count_is_that_of_the_real_model(name: str) -> None:
    model, counted = real(name), count(described(name))
    assert counted.numel == sum(parameter.numel() for parameter in model.parameters())
    assert counted.tied == bool(model.config.tie_word_embeddings)
    assert {parameter.layer for parameter in counted.parameters} == {None, 0, 1, 2}
    first = [parameter.name for parameter in counted.parameters if parameter.layer is None and not parameter.last]
    assert first == [counted.embedding] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("name", ["qwen2-tied", "llama-untied"])
def test_a_critic_has_a_trunk_and_a_scalar_head(name: str) -> None:
    config = real(name).config
    critic = Critic(AutoModel.from_config(config))
    assert count(described(name), value_model=True).numel == sum(p.numel() for p in critic.parameters())


def test_what_else_a_config_says_does_not_matter() -> None:
    text = described("qwen2-tied")
    assert count(text | {"architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16"}) == count(text)


def test_the_layers_of_a_vision_tower_are_not_taken_for_the_models() -> None:
    text = described("gemma2") | {"model_type": "gemma3_text"}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    both = count(
        {"model_type": "gemma3", "text_config": text, "vision_config": {"model_type": "siglip_vision_model"} | vision}
    )
    alone = count(text)
    assert both.numel > alone.numel
    assert sum(p.numel for p in both.parameters if p.layer == 1) == sum(
        p.numel for p in alone.parameters if p.layer == 1
    )
    assert both.embedding.endswith("embed_tokens.weight")


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava_onevision", "idefics3"])
def test_a_vision_tower_is_counted_on_the_first_stage(kind: str, vlm_folder: Callable[[str], Path]) -> None:
    folder = vlm_folder(kind)
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = AutoModelForImageTextToText.from_pretrained(folder)
    tower = sum(parameter.numel() for parameter in tower_parameters(model))
    for value_model in (False, True):
        counted = count(described, value_model=value_model)
        first = [each for each in counted.stage(Layout.parse("p2"), 0) if each.layer is None]
        assert sum(each.numel for each in first if each.name != counted.embedding) == tower > 0
    assert count(described).numel == sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def pretended_world(rank: int, ranks: int) -> Iterator[None]:
    """A process group whose other members do nothing, for what needs no communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("shards", "rank"), [(2, 0), (3, 1), (3, 2), (8, 7)])
def test_a_rank_holds_the_shards_that_fsdp2_makes(shards: int, rank: int) -> None:
    with pretended_world(rank, shards):
        mesh = init_device_mesh("cpu", (shards,))
        model = real("qwen2-tied")
        for layer in model.base_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        held = 0
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            held += parameter._local_tensor.untyped_storage().nbytes()  # padded, as it lies in memory
    of = need(
        count(described("qwen2-tied")), Layout(data=shards), Coordinates(0, rank, 0), workload("sharded"), trained=True
    )
    assert (of.weights, of.gradients, of.moments) == (held, held, 2 * held)


@pytest.mark.parametrize("layout", ["t2", "t4", "p2", "p3", "t2p3", "d2t2p2", "r2d2t2"])
@pytest.mark.parametrize("name", ["qwen2-tied", "llama-untied", "qwen3", "qwen3_moe"])
def test_slices_and_stages_add_up_to_the_model(name: str, layout: str) -> None:
    model, grid = count(described(name)), WorkerGrid.of(Layout.parse(layout))
    cut: dict[str, int] = {}
    for pipeline in range(grid.pipeline):
        for parameter in model.stage(grid.layout, pipeline):
            shapes = [parameter.slice(grid.tensor, index) for index in range(grid.tensor)]
            whole = shapes.count(parameter.shape) == grid.tensor
            assert whole or sum(map(prod, shapes)) == parameter.numel
            assert not whole or grid.tensor == 1 or parameter.cut is None or parameter.heads == 2
            cut[parameter.name] = cut.get(parameter.name, 0) + parameter.numel
    embedding = next(p for p in model.parameters if p.name == model.embedding)
    twice = embedding.numel if model.tied and grid.pipeline > 1 else 0
    assert sum(cut.values()) == model.numel + twice
    assert cut.keys() == {parameter.name for parameter in model.parameters}


def test_the_plan_cuts_what_it_should() -> None:
    cuts = {parameter.name: parameter.cut for parameter in count(described("qwen3_moe")).parameters}
    layer = "model.layers.1."
    assert cuts["model.embed_tokens.weight"] == cuts["lm_head.weight"] == 0
    assert cuts[f"{layer}self_attn.q_proj.weight"] == 0
    assert cuts[f"{layer}self_attn.o_proj.weight"] == 1
    assert cuts[f"{layer}mlp.experts.gate_up_proj"] == cuts[f"{layer}mlp.experts.down_proj"] == 0, "experts are dealt"
    assert cuts[f"{layer}mlp.gate.weight"] is cuts[f"{layer}input_layernorm.weight"] is None


def packed_inputs(lengths: list[int]) -> dict[str, Any]:
    """Inputs of the trunk for sequences that lie end to end."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    return inputs_of(positions, blocks(lengths))


def shared_inputs(tree: Branches) -> dict[str, Any]:
    """Inputs of the trunk for the trie `tree`."""
    stream = lay_out(tree)
    positions = np.empty(stream.size, dtype=np.int64)
    positions[stream.indices_I] = np.concatenate([np.arange(length) for length in tree.lengths])
    return inputs_of(torch.from_numpy(positions), stream.blocks)


def inputs_of(positions: torch.Tensor, made: list[Block[Ints]]) -> dict[str, Any]:
    device = torch.device("cpu")
    reported = [DeviceBlock(block.with_indices(upload(block.indices(), device))) for block in made]
    ids = torch.randint(0, BASE["vocab_size"], (1, len(positions)))
    return {"input_ids": ids, "position_ids": positions[None], "attention_blocks": reported, "use_cache": False}


def kept_by_autograd(model: PreTrainedModel, inputs: dict[str, Any]) -> int:
    """Bytes of the storages that a forward pass of the trunk keeps for its backward pass, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(**inputs)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen2-tied", "llama-untied", "qwen3", "mixtral", "qwen3_moe"])
def test_activations_are_what_autograd_keeps_of_a_layer(name: str, dtype: str) -> None:
    lengths = [128] * 4
    models = [real(name, num_hidden_layers=layers, attention=PACKED, dtype=getattr(torch, dtype)) for layers in (1, 2)]
    kept = [kept_by_autograd(model, packed_inputs(lengths)) for model in models]
    per_token = (kept[1] - kept[0]) / sum(lengths)
    computed = layer_bytes_per_token(count(described(name)).sizes, 1, workload(dtype=dtype))
    assert computed == pytest.approx(per_token, rel=0.03)


@pytest.mark.parametrize(("prompt", "answer"), [(200, 40), (20, 100)], ids=["masked", "whole paths"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_shared_prefixes_keep_is_counted_as_they_are_laid_out(prompt: int, answer: int, dtype: str) -> None:
    """Keys and values of a prefix are gathered for each of its sequences; the masks are those of all layers."""
    group, name = 4, "qwen3"
    budget = 2 * (prompt + group * answer)
    shape = packed_shape(prompt, answer, group, budget, share=True)
    lengths, shared = [prompt + answer] * 2 * group, ([0] + [prompt] * (group - 1)) * 2
    tree = Branches(np.arange(2 * group), np.array(lengths), np.array(shared))
    assert tree.tokens == budget
    models = [real(name, num_hidden_layers=layers, attention=PACKED, dtype=getattr(torch, dtype)) for layers in (1, 2)]
    kept = [kept_by_autograd(model, shared_inputs(tree)) for model in models]
    work = replace(workload(dtype=dtype, tokens=budget), shape=shape)
    per_layer = layer_bytes_per_token(count(described(name)).sizes, 1, work) * budget
    assert per_layer == pytest.approx(kept[1] - kept[0], rel=0.03)
    assert (shape.queries > 1, shape.keys > 1, shape.masked_pairs > 0) == (prompt < answer, True, prompt > answer)
    without = replace(work, shape=AttentionShape())
    unshared = layer_bytes_per_token(count(described(name)).sizes, 1, without) * budget
    rest = kept[0] - (kept[1] - kept[0])  # beside layers: the masks, and what the embedding and the last norm keep
    assert work.mask_bytes <= rest
    assert rest - work.mask_bytes < 0.2 * unshared


@pytest.mark.parametrize("layout", ["packed", "padded", "tree", "checkpointed", "on the host"])
def test_the_peak_of_a_train_step_is_that_of_the_cpu_allocator(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a step allocates, by torch's own count of its allocator; parameters and moments exist before.

    numpy's memory, which it does not count, stands for the host's.
    """

    def on_the_host(tensor: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.empty_like(tensor.numpy()))

    monkeypatch.setattr(model_layers, "host_like", on_the_host)
    checkpointed = layout in ("checkpointed", "on the host")
    layers, prompt, answer, group = 6, 48, 24, 4
    padded = layout == "padded"
    length = prompt + answer
    tokens = prompt + group * answer if layout == "tree" else group * length
    model = real("qwen2-tied", num_hidden_layers=layers, attention="eager" if padded else PACKED)
    engine = FlatPolicyEngine(
        model,
        temperature=1.0,
        attention={"padded": AttentionKind.padded, "tree": AttentionKind.tree}.get(layout, AttentionKind.packed),
        tokens_per_micro_batch=tokens,
        optimizer=FlatOptimizer(model.named_parameters(), OptimizerConfig()),
        gradient_checkpointing=checkpointed,
        activations_on_host=layout == "on the host",
    )
    batch = group_of_answers(prompt, answer, group)
    wanted = torch.ones(batch.num_tokens, dtype=torch.bool)
    wanted[torch.from_numpy(batch.starts_S)] = False

    def step() -> None:
        engine.compute_gradients(batch, wanted, range(group), lambda _, out: (out.logprobs_N.sum(), {}))

    peak = allocated_at_the_peak(step)
    work = Workload(
        "flat",
        Dtype.float32,
        AttentionImplementation.eager if padded else AttentionImplementation.sdpa,
        tokens,
        length,
        activations_on_host=layout == "on the host",
        shape=packed_shape(prompt, answer, group, tokens, share=layout == "tree"),
    )
    of = need(
        count(described("qwen2-tied", num_hidden_layers=layers)), Layout(), Coordinates(0, 0, 0), work, trained=True
    )
    expected = (of.total_checkpointed if checkpointed else of.total) - of.kept
    assert peak == pytest.approx(expected, rel=0.1), (peak, expected)


@pytest.mark.parametrize("key_value_heads", [2, 4])
@pytest.mark.parametrize("context", [1, 4])
def test_a_layer_whose_attention_is_its_widest_part_peaks_there(context: int, key_value_heads: int) -> None:
    """With its exchanges between the parts of the tokens, whose other ranks do nothing here."""
    tokens, layers = 1024, 4
    wide = {"num_key_value_heads": key_value_heads, "head_dim": 64, "intermediate_size": 64}
    sizes = {"num_hidden_layers": layers, **wide}
    inputs = packed_inputs([128] * (tokens // 128))
    with pretended_world(0, 4):
        if context > 1:
            assert dist.group.WORLD is not None
            part = StreamPart(dist.group.WORLD, 0, context, tokens)
            cut = {name: part.own(inputs[name][0])[None] for name in ("input_ids", "position_ids")}
            inputs |= cut | {"stream_part": part}
        trunk = real("qwen3", attention=across_ranks(PACKED) if context > 1 else PACKED, **sizes).base_model
        checkpoint_layers(trunk)
        peak = allocated_at_the_peak(lambda: trunk(**inputs).last_hidden_state.sum().backward())
    model = count(described("qwen3", **sizes))
    work, at = workload("flat", tokens=tokens), Coordinates(0, 0, 0)
    of = need(model, Layout(context=context), at, work, trained=True)
    assert peak == pytest.approx(of.checkpointed + of.recomputed, rel=0.06)
    part_tokens, kept = tokens // context, layer_bytes_per_token(model.sizes, 1, work, context)
    assert of.recomputed > 1.03 * part_tokens * (kept + 2 * 64 * 4), "the feed-forward's moment is not the peak"


def allocated_at_the_peak(step: Callable[[], Any]) -> int:
    """Bytes that `step` holds at most, by torch's count of its allocator, once it has made what it makes once."""
    step()
    with torch.profiler.profile(profile_memory=True) as profiled:
        step()
    held = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def group_of_answers(prompt: int, answer: int, group: int) -> StepBatch:
    """`group` answers of as many tokens to one prompt; the last one's successor is wanted too."""
    rng = np.random.default_rng(0)
    first, samples = rng.integers(0, 131, prompt), []
    for _ in range(group):
        tokens = np.concatenate([first, rng.integers(0, 131, answer + 1)]).astype(np.int32)
        mask = (np.arange(len(tokens)) >= prompt).astype(np.uint8)
        versions = np.where(mask, 0, -1).astype(np.int32)
        samples.append(Sample(tokens, mask, np.zeros(len(tokens), np.float32), versions, 0.0))
    return build_step_batch([Trajectory("r", "p", 0, tuple(samples))], [0], version=0, num_minibatches=1)


def test_what_the_flat_engine_keeps() -> None:
    model = count(described("qwen2-tied"))
    at, values = Coordinates(0, 0, 0), model.numel
    of = need(model, Layout(), at, workload("flat"), trained=True)
    assert (of.weights, of.gradients, of.moments, of.gathered) == (4 * values, 4 * values, 8 * values, 0)
    of = need(model, Layout(data=4), at, workload("flat", "bfloat16"), trained=True)
    assert (of.weights, of.gradients, of.moments) == (6 * values, 4 * values, 8 * values)
    of = need(model, Layout(), at, workload("flat", "bfloat16"), trained=False)
    assert (of.weights, of.gradients, of.moments, of.reducing) == (2 * values, 0, 0, 0)


layouts = st.builds(
    lambda d, t, p, c: Layout(d, t, p, context=c),
    st.integers(1, 8),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
)
LLAMA = count(described("llama-untied"))


@given(layouts, st.sampled_from(["float32", "bfloat16"]))
def test_more_ranks_never_need_more_each(layout: Layout, dtype: str) -> None:
    def worst(of: Layout) -> int:
        grid = WorkerGrid.of(of)
        return max(
            need(LLAMA, of, grid.coordinates(worker), workload(dtype=dtype), trained=True).kept
            for worker in grid.members
        )

    assert worst(layout) <= worst(Layout(1, layout.tensor, layout.pipeline))
    assert worst(layout) <= worst(Layout(layout.data, 1, layout.pipeline))
    assert worst(layout) == worst(Layout(layout.data * layout.context, layout.tensor, layout.pipeline))
    grid = WorkerGrid.of(layout)
    for worker in grid.members:
        of = need(LLAMA, layout, grid.coordinates(worker), workload(dtype=dtype), trained=True)
        assert (
            of.kept <= of.total_checkpointed <= of.total or layout.pipeline == 3
        )  # one layer a stage: nothing is saved
        assert (of.logits > 0) == (grid.coordinates(worker).pipeline == layout.pipeline - 1)


@pytest.mark.parametrize("context", [2, 4])
def test_activations_are_those_of_a_part_of_the_tokens(context: int) -> None:
    """Of two key-value heads four ranks have one each, which are repeated: these alone are not divided."""
    whole, part = (
        need(LLAMA, layout, Coordinates(0, 0, 0), workload(), trained=True)
        for layout in (Layout(4), Layout(4 // context, context=context))
    )
    assert part.kept == whole.kept
    assert part.checkpointed * context == whole.checkpointed
    repeated = LLAMA.sizes.key_value_heads < context
    assert (part.activations * context > whole.activations) == repeated
    assert part.activations * context < 1.2 * whole.activations


def test_replicas_hold_the_same_shards() -> None:
    at, work = Coordinates(0, 5, 0), workload()
    assert need(LLAMA, Layout(8, replicas=2), at, work, trained=True) == need(
        LLAMA, Layout(4), Coordinates(0, 1, 0), work, trained=True
    )


def test_roles_of_a_rank_keep_all_they_have_and_work_one_after_the_other() -> None:
    small = MemoryNeed(weights=10, gradients=20, moments=40, activations=5, checkpointed=4, logits=1)
    large = MemoryNeed(weights=1, activations=100, checkpointed=3, gathered=50, reducing=30, reduced_last=200)
    both = total([small, large])
    assert both == large.beside(small)
    assert (both.weights, both.gradients, both.moments) == (11, 20, 40)
    assert both.total == 71 + 50 + max(100 + 30, 200)
    assert both.total_checkpointed == 71 + 50 + max(4 + 30, 200)


def test_a_model_that_is_there_is_sized_as_its_config_is() -> None:
    assert sized(real("qwen3")) == count(described("qwen3"))


def test_moments_in_host_memory_are_on_the_device_in_pieces_only() -> None:
    here = need(LLAMA, Layout(2), Coordinates(0, 0, 0), workload(), trained=True)
    there = need(LLAMA, Layout(2), Coordinates(0, 0, 0), replace(workload(), moments_on_host=True), trained=True)
    assert (there.moments, there.host) == (0, here.moments)
    assert there.total == here.total - here.moments


def test_inputs_of_layers_in_host_memory_are_on_the_device_two_at_a_time() -> None:
    work = replace(workload(tokens=1 << 16), activations_on_host=True)
    at, inputs = Coordinates(0, 0, 0), (1 << 16) * 64 * 4
    here = need(LLAMA, Layout(2), at, replace(work, activations_on_host=False), trained=True)
    there = need(LLAMA, Layout(2), at, work, trained=True)
    assert (here.host_inputs, there.host_inputs) == (0, 3 * inputs)
    assert here.checkpointed - there.checkpointed == inputs, "of three layers' inputs two are on the device"
    assert there.total == here.total, "without gradient checkpointing nothing moves"
    assert need(LLAMA, Layout(2), at, work, trained=False).host_inputs == 0
    assert there.beside(there).on_host == total([there, there]).on_host == there.on_host, "one role works at a time"


def test_of_off_loaded_roles_one_is_on_the_device_and_all_are_on_the_host() -> None:
    actor = MemoryNeed(weights=10, gradients=20, moments=40, activations=5, checkpointed=4, logits=1)
    reference = MemoryNeed(weights=30, activations=3, checkpointed=3)
    both = total([actor, reference], offload=True)
    assert both.total == actor.total
    assert both.host == 10 + 40 + 30
    assert total([actor, reference]).host == 0
