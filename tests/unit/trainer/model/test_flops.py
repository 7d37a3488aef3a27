"""Counted operations are those that torch counts while it computes, and layouts count what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrl.algorithms.arithmetic import Stats
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.models.transformers_internals import trunk_of
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import PolicyOutputs
from asyncrl.trainer.engines.flat import FlatLoader, FlatOptimizer, FlatPolicyEngine
from asyncrl.trainer.model.flops import Attended, FlopCount, ForwardPass, NotCounted, model_flops
from asyncrl.trainer.model.load_models import load_causal_lm
from asyncrl.trainer.model.lora import add_adapters
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.settings import LoraConfig, OptimizerConfig, VisionMode
from tests.vlm_batches import vlm_batch, vlm_trajectories

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "attn_implementation": "eager",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "gemma4_text": {
        "model_type": "gemma4_text",
        "head_dim": 8,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 32,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 61,
        "num_kv_shared_layers": 0,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}
aten = torch.ops.aten
MATRICES = (aten.mm, aten.addmm, aten.convolution, aten.convolution_backward)
"""All but the products of pairs."""
SEQUENCES, LENGTH, WANTED = 2, 11, 7
MakeBatch = Callable[..., StepBatch]


def _model(kind: str) -> PreTrainedModel:
    settings = SIZES | MODELS[kind]
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(settings.pop("model_type"), **settings),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return model


def _counted(model: PreTrainedModel, *, backward: bool) -> int:
    """Operations that torch counts: all layers on some sequences, the head on `WANTED` tokens of them."""
    ids = torch.randint(61, (SEQUENCES, LENGTH))
    with FlopCounterMode(display=False) as counter:
        hidden = trunk_of(model)(input_ids=ids, use_cache=False).last_hidden_state
        head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        logits: Tensor = head(hidden.flatten(0, 1)[:WANTED])
        if backward:
            logits.sum().backward()  # type: ignore[no-untyped-call]
    by_module = counter.get_flop_counts()
    turns = sum(sum(ops.values()) for name, ops in by_module.items() if name.endswith("rotary_emb"))
    return counter.get_total_flops() - turns


def _all_pairs() -> ForwardPass:
    """Attention without a kernel computes each pair of two tokens of a sequence."""
    return ForwardPass(np.full(SEQUENCES * LENGTH, LENGTH), WANTED)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_forward_and_backward_are_what_torch_counts(kind: str, backward: bool) -> None:
    model = _model(kind)
    flops = model_flops(model, trunk_of(model))
    assert flops.of(_all_pairs(), backward=backward) == _counted(model, backward=backward)
    assert FlopCount(model, trunk_of(model)).left_out == []


def test_a_frozen_model_has_no_backward_pass() -> None:
    model = _model("llama").requires_grad_(False)
    flops = model_flops(model, trunk_of(model))
    assert flops.of(_all_pairs(), backward=True) == flops.of(_all_pairs(), backward=False)


def test_of_adapters_the_frozen_matrices_have_gradients_of_their_inputs_alone() -> None:
    model = _model("llama")
    add_adapters(model, LoraConfig(rank=3, targets=["q_proj", "v_proj", "down_proj"]), vision=False)
    flops = model_flops(model, trunk_of(model))
    # Of the first layer, torch computes no gradient for what comes before the adapters: three inputs, and all keys.
    tokens, hidden, keys = SEQUENCES * LENGTH, 32, 16
    inputs = 2 * tokens * hidden * (hidden + 2 * keys + 3 + 3)
    keys_of_pairs = 2 * tokens * LENGTH * hidden
    beyond = flops.of(_all_pairs(), backward=True) - _counted(model, backward=True)
    assert beyond == inputs + keys_of_pairs


def test_layers_below_the_first_adapters_have_no_backward_pass() -> None:
    model = _model("llama").requires_grad_(False)
    trunk = trunk_of(model)
    flops = {}
    for layer in (0, 2):
        model.requires_grad_(False)
        trunk.layers[layer].mlp.requires_grad_(True)
        flops[layer] = model_flops(model, trunk).of(_all_pairs(), backward=True)
    below = 2 * 2 * SEQUENCES * LENGTH * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48) + 2 * 8 * SEQUENCES * LENGTH**2 * 32
    assert flops[0] - flops[2] == below, "gradients of inputs of two layers: their matrices and their pairs"


def test_windows_and_chunks_hide_pairs() -> None:
    depths = np.array([1, 2, 3, 4, 5, 1, 2])
    assert Attended().pairs(depths) == 18
    assert Attended(window=3).pairs(depths) == 1 + 2 + 3 + 3 + 3 + 1 + 2
    assert Attended(chunk=2).pairs(depths) == 1 + 2 + 1 + 2 + 1 + 1 + 2


def test_layers_with_windows_are_told_from_others() -> None:
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gemma2", **SIZES | {"head_dim": 8, "sliding_window": 4})
    )
    kinds = model.config.layer_types
    pairs = model_flops(model, trunk_of(model)).pairs
    assert {sees.window: product.forward for sees, product in pairs.items()} == {
        4: kinds.count("sliding_attention") * 4.0 * 32,
        None: kinds.count("full_attention") * 4.0 * 32,
    }


def test_recurrent_layers_have_no_pairs() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 61, "state_size": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes))
    flops = model_flops(model, trunk_of(model))
    assert flops.pairs == {}
    assert flops.token.forward > 0
    assert FlopCount(model, trunk_of(model)).left_out == ["the states of 2 recurrent layers"]


def test_experts_that_nobody_says_how_many_are_chosen_of_are_not_counted() -> None:
    model = _model("mixtral")
    vars(model.config)["num_experts_per_tok"] = 0
    with pytest.raises(NotCounted, match="mixtral does not say how many experts"):
        model_flops(model, trunk_of(model))


def _engine(path: Path, kind: AttentionKind, *, train: bool = False) -> FlatPolicyEngine:
    model = load_causal_lm(path, "float32", "eager" if kind == AttentionKind.padded else "sdpa", torch.device("cpu"))
    return FlatPolicyEngine(
        model,
        temperature=1.0,
        attention=kind,
        tokens_per_micro_batch=200,
        optimizer=FlatOptimizer(model.named_parameters(), OptimizerConfig()) if train else None,
    )


def _loss(micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, Stats]:
    return outputs.logprobs_N.sum(), {}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", [AttentionKind.padded, AttentionKind.packed, AttentionKind.tree])
def test_layouts_count_each_token_and_each_pair_that_they_compute(
    kind: AttentionKind, train: bool, llama_dir: Path, make_batch: MakeBatch
) -> None:
    batch = make_batch(groups=2, group_size=4)
    engine = _engine(llama_dir, kind, train=train)
    wanted_T, everything = batch["loss_mask"], range(batch.num_seqs)
    inputs = []
    for seq in everything:
        begin, length = int(batch.starts_S[seq]), int(batch.lengths_S[seq])
        last = wanted_T[begin : begin + length].nonzero().max()
        inputs.append(tuple(batch["tokens"][begin : begin + last].tolist()))
    prefixes = [tokens[:end] for tokens in inputs for end in range(1, len(tokens) + 1)]
    micro_batches = list(engine.micro_batches(batch, wanted_T))
    assert len(micro_batches) == 1, "a prefix is computed once in a micro-batch"
    computed = set(prefixes) if "attention_blocks" in micro_batches[0].model_inputs and kind == "tree" else prefixes
    if kind == AttentionKind.tree:
        assert len(computed) < len(prefixes), "the samples of a group share their prompts"
    before = engine.flops
    assert before is not None
    if train:
        engine.compute_gradients(batch, wanted_T, everything, _loss)
    else:
        engine.logprobs(batch, wanted_T)
    work = ForwardPass(np.array(sorted(map(len, computed))), int(wanted_T.sum()))
    flops = model_flops(engine.module, trunk_of(engine.network))
    assert engine.flops == before + flops.of(work, backward=train)


@pytest.mark.parametrize("mode", [VisionMode.train, VisionMode.freeze])
def test_matrices_of_a_vision_tower_are_counted_as_pictures_need_them(
    mode: VisionMode, vlm_folder: Callable[[str], Path]
) -> None:
    folder = vlm_folder("qwen2_vl")
    config = ExperimentConfig()
    config.model.path, config.model.vision, config.generation.context_length = str(folder), mode, 256
    config.model.dtype = Dtype.float32
    engine = FlatLoader(config, RankPosition(), torch.device("cpu")).policy(
        str(folder), Dtype.float32, OptimizerConfig()
    )
    batch = vlm_batch(vlm_trajectories(folder))
    micro_batches = list(engine.micro_batches(batch, batch["loss_mask"]))
    works = [ForwardPass(each.depths, len(each.targets_N)) for each in micro_batches]
    text = model_flops(engine.module, trunk_of(engine.network))
    left_out = FlopCount(engine.module, trunk_of(engine.network)).left_out
    assert left_out == ["attention between the patches of a picture"]
    before = engine.flops
    assert before is not None
    with FlopCounterMode(display=False) as counter:
        engine.compute_gradients(batch, batch["loss_mask"], range(batch.num_seqs), _loss)
    everything = counter.get_flop_counts()["Global"]
    matrices = sum(everything.get(op, 0) for op in MATRICES)
    of_text = sum(replace(text, pairs={}).of(work, backward=True) for work in works)
    of_text += len(works) * text.wanted.forward  # the head of one token, which tells the size of the vocabulary
    assert engine.flops is not None
    assert engine.flops - before - sum(text.of(work, backward=True) for work in works) == matrices - of_text
