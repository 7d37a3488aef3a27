"""The parity check sees every fault that it is there for, however small random weights make it, and no rounding."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from asyncrl.inference.embedded import attention, step
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.engine_io import GenerationInput, SamplingSpec
from asyncrl.models.parity import (
    Difference,
    Rounding,
    UnsupportedModelError,
    other_kernel,
    plain_logprobs,
    probe_sequences,
)
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind, Branches, Stream, blocks, lay_out
from asyncrl.trainer.engines.flat import FlatPolicyEngine, FlatValueEngine
from asyncrl.trainer.model import attention as trainer_attention
from asyncrl.trainer.model import layout_parity
from asyncrl.trainer.model.attention import PACKED, VARLEN, all_pairs
from asyncrl.trainer.model.layout_parity import first_layout, select_attention
from asyncrl.trainer.model.value_models import Critic
from asyncrl.trainer.settings import AttentionImplementation

MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_local_experts": 4},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 6},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "granite": {"logits_scaling": 3.0},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mamba": {"state_size": 8},
    "rwkv": {"attention_hidden_size": 32},
    "minimax": {"num_local_experts": 2, "block_size": 8, "layer_types": ["linear_attention", "full_attention"]},
    "phi3": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
        "original_max_position_embeddings": 24,
        "eos_token_id": 2,
    },
    "phimoe": {"num_local_experts": 4, "sliding_window": 24},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
    },
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 24,
        "max_position_embeddings": 128,
    },
    "moshi": {"ffn_dim": 48, "sliding_window": 24, "audio_vocab_size": 40, "num_key_value_heads": 4},
    "llama4_text": {
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "attention_chunk_size": 24,
        "no_rope_layers": [1, 0],
        "eos_token_id": 2,
        "bos_token_id": 1,
    },
    "minicpm3": {
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
        "dim_model_base": 16,
    },
    "modernbert-decoder": {"local_attention": 24, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 3},
}
SPREADS = (0.02, 0.25)
DTYPES = (torch.float32, torch.bfloat16)
WEIGHTS = [  # differences are smallest with small weights, and rounding is largest in bfloat16
    (0.25, torch.float32),
    (0.02, torch.bfloat16),
    pytest.param(0.02, torch.float32, marks=pytest.mark.every_case),
    pytest.param(0.25, torch.bfloat16, marks=pytest.mark.every_case),
]


def build(
    model_type: str, spread: float = 0.25, dtype: torch.dtype = torch.float32, **settings: Any
) -> PreTrainedModel:
    common = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "initializer_range": spread,
    }
    torch.manual_seed(3)
    config = CONFIG_MAPPING[model_type](**{**common, **MODELS[model_type], **settings})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return model


def settle(
    model: PreTrainedModel,
    setting: AttentionImplementation = AttentionImplementation.sdpa,
    *,
    longest: int = 24,
    row: int = 0,
    share_prefixes: bool = True,
) -> AttentionKind:
    engine = FlatPolicyEngine(model, temperature=0.7, attention=first_layout(setting)[0], tokens_per_micro_batch=16)
    select_attention(engine, setting, longest=longest, row=row, share_prefixes=share_prefixes)
    return engine.attention


@pytest.mark.parametrize(("spread", "dtype"), WEIGHTS)
@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gemma2", "gpt_oss", "granite"])
def test_attention_that_keeps_sequences_apart_is_trained_packed(
    model_type: str, spread: float, dtype: torch.dtype
) -> None:
    model = build(model_type, spread, dtype)
    assert settle(model, share_prefixes=False) == AttentionKind.packed
    assert settle(model) == AttentionKind.tree


@pytest.mark.parametrize(("spread", "dtype"), WEIGHTS)
@pytest.mark.parametrize("model_type", ["lfm2", "bamba", "bloom", "mamba"])
def test_what_leaks_is_trained_on_padded_rows_and_the_log_says_why(
    model_type: str, spread: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert settle(build(model_type, spread, dtype)) == AttentionKind.padded
    assert "is trained on padded rows" in caplog.text
    assert "packed" in caplog.text


@pytest.mark.parametrize(("spread", "dtype"), WEIGHTS)
@pytest.mark.parametrize("model_type", ["lfm2", "bamba"])
def test_a_leak_that_raises_nothing_is_seen_by_its_gradient(
    model_type: str,
    spread: float,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without `seq_idx` torch's convolution mixes neighbours and says nothing."""
    monkeypatch.setattr("asyncrl.trainer.batches.micro_batch.packing_arguments", lambda *_: {})
    with caplog.at_level(logging.WARNING):
        assert settle(build(model_type, spread, dtype)) == AttentionKind.padded
    if model_type == "lfm2" and spread == SPREADS[0]:  # what it does to the log-probabilities looks like rounding
        assert "packed sequences leak into each other" in caplog.text


@pytest.mark.parametrize(("spread", "dtype"), WEIGHTS)
def test_a_packed_attention_that_leaks_is_refused(
    spread: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block of all sequences in one row: each sees those before it."""

    monkeypatch.setattr("asyncrl.trainer.batches.micro_batch.blocks", lambda lengths: blocks([sum(lengths)]))
    assert settle(build("llama", spread, dtype), share_prefixes=False) == AttentionKind.padded


@pytest.mark.parametrize("spread", SPREADS)
def test_a_tree_whose_branches_see_each_other_is_not_used(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that ask from their beginning, as if they had all of the path before: each sees later tokens."""

    def shifted(tree: Branches) -> Stream:
        stream = lay_out(tree)
        rows = [replace(row, first=None if row.first is None else row.first + 1) for row in stream.blocks]
        return replace(stream, blocks=rows)

    monkeypatch.setattr("asyncrl.trainer.batches.micro_batch.lay_out", shifted)
    assert settle(build("llama", spread)) == AttentionKind.packed


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("model_type", "attention"), [("llama", VARLEN), ("gemma2", PACKED), ("gpt_oss", PACKED)])
def test_torchs_variable_length_kernel_is_used_where_it_exists_and_is_right(
    model_type: str, attention: str, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(model_type, spread)
    assert settle(model) == AttentionKind.tree
    assert model.config._attn_implementation == PACKED, "there is no kernel for a CPU"
    monkeypatch.setattr(layout_parity, "kernel_exists", lambda *_: True)
    for share, kind in ((True, AttentionKind.tree), (False, AttentionKind.packed)):
        assert settle(model, share_prefixes=share) == kind
        assert model.config._attn_implementation == attention

    def without_ends(*tensors: Any, **options: Any) -> Tensor:
        query, key, value, ends, *rest = tensors
        return all_pairs(query, key, value, ends[[0, -1]], *rest, **options)

    monkeypatch.setattr("asyncrl.trainer.model.attention.all_pairs", without_ends)
    assert settle(model) == AttentionKind.tree
    assert model.config._attn_implementation == PACKED, "a kernel that mixes sequences is not used"


Mutation = Callable[[pytest.MonkeyPatch], None]


def without(name: str, module: Any, function: str) -> Mutation:
    """The attention function `function` of `module` deaf to the keyword `name`."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = getattr(module, function)

        def deaf(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **{key: value for key, value in kwargs.items() if key != name})

        patch.setattr(module, function, deaf)

    return mutate


@pytest.mark.parametrize(
    ("model_type", "left_out"), [("gpt_oss", "s_aux"), ("gemma2", "softcap"), ("granite", "scaling")]
)
def test_packed_attention_that_leaves_something_out_is_not_used(
    model_type: str, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(left_out, trainer_attention, "packed_attention")(monkeypatch)
    trainer_attention.register_attention(PACKED, trainer_attention.packed_attention)
    try:
        assert settle(build(model_type)) == AttentionKind.padded
    finally:
        monkeypatch.undo()
        trainer_attention.register_attention(PACKED, trainer_attention.packed_attention)


@pytest.mark.parametrize("model_type", ["granite", "gemma2"])
def test_logits_that_are_made_in_an_unknown_way_are_refused_by_name(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.models.transformers_internals._LOGIT_FACTORS", {})
    with pytest.raises(UnsupportedModelError) as refused:
        settle(build(model_type))
    message = str(refused.value)
    assert message.startswith(
        f"{type(build(model_type)).__name__} cannot be trained with model.attn_implementation='sd"
    )
    for part in (
        "packed (asyncrl_packed): 8 sequences computed together differ",
        "on padded rows (eager)",
        "Use model.",
    ):
        assert part in message


def test_a_model_whose_own_forward_fails_is_refused_with_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", dtype=torch.bfloat16)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel of this type")

    monkeypatch.setattr(model, "forward", fails)
    with pytest.raises(UnsupportedModelError, match=r"own forward of it in bfloat16 fails: RuntimeError: no kernel"):
        settle(model)


def test_layers_that_only_long_sequences_tell_apart_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    assert settle(model) == AttentionKind.padded


@pytest.mark.parametrize(("model_type", "kind"), [("llama", AttentionKind.tree), ("lfm2", AttentionKind.padded)])
def test_a_critic_is_proven_by_its_trunk_though_its_values_are_all_zero(model_type: str, kind: AttentionKind) -> None:
    critic = FlatValueEngine(
        Critic(build(model_type, 0.02).base_model), attention=AttentionKind.packed, tokens_per_micro_batch=16
    )
    select_attention(critic, AttentionImplementation.sdpa, longest=24)
    assert critic.attention == kind


def test_the_proof_leaves_no_gradient_and_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama").requires_grad_(True)
    settle(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks


# The embedded engine.


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_rounding_of_bfloat16_is_no_fault(model_type: str, spread: float) -> None:
    GenerationEngine(build(model_type, spread, torch.bfloat16), max_running_requests=2)


def sharp(dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with logits as large as trained ones: 16 bits round them by more than random weights' ever are."""
    model = build("llama", 0.25, dtype)
    model.lm_head.weight.data *= 6.0
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_that_transformers_kernels_have_among_themselves_is_no_fault(dtype: torch.dtype) -> None:
    model = sharp(dtype)
    probes = probe_sequences(40)
    plain = [plain_logprobs(model, tokens) for tokens in probes]
    own = Difference.of(plain, other_kernel(model, probes)).mean
    assert (own > Rounding.least(dtype).mean) == (dtype == torch.bfloat16)
    GenerationEngine(model, max_running_requests=2)
    assert settle(sharp(dtype)) == AttentionKind.tree
    critic = FlatValueEngine(Critic(sharp(dtype).base_model), attention=AttentionKind.tree, tokens_per_micro_batch=16)
    select_attention(critic, AttentionImplementation.sdpa, longest=24)
    assert critic.attention == AttentionKind.tree


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_of_transformers_that_contradict_each_other_allow_nothing(dtype: torch.dtype) -> None:
    plain = [torch.zeros(9)]
    assert Rounding.of(plain, [torch.full((9,), 5.0)], dtype).mean < 10 * Rounding.least(dtype).mean
    assert Rounding.of(plain, plain, dtype) == Rounding.least(dtype)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("rwkv", "it carries a state from token to token in a form of its own"),
        ("minimax", r"its forward with slots fails: ValueError: MiniMax uses cache of its own"),
        ("bloom", "it has an attention of its own; its forward with slots fails"),
    ],
)
def test_what_they_cannot_hold_is_refused_by_name(model_type: str, reason: str) -> None:
    model = build(model_type)
    with pytest.raises(UnsupportedModelError, match=reason) as refused:
        GenerationEngine(model, max_model_len=32)
    assert str(refused.value).startswith(f"{type(model).__name__} is not served by the embedded engine: ")
    assert str(refused.value).endswith("Use generation.backend=sglang")


@pytest.mark.parametrize("function", ["slot_attention", "slot_decode_attention"])
@pytest.mark.parametrize(
    ("model_type", "left_out"), [("gpt_oss", "s_aux"), ("gemma2", "softcap"), ("granite", "scaling")]
)
def test_an_engine_whose_prefill_or_decoding_leaves_something_out_refuses(
    model_type: str, left_out: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(left_out, attention, function)(monkeypatch)
    with pytest.raises(UnsupportedModelError, match=r"differ from transformers. plain forward"):
        GenerationEngine(build(model_type))


def _one_slot_for_all(patch: pytest.MonkeyPatch) -> None:
    original = step.PrefixForward.compute
    patch.setattr(
        step.PrefixForward,
        "compute",
        lambda self, slots_of, bases: original(
            self, {prefix: [0 for _ in slots] for prefix, slots in slots_of.items()}, bases
        ),
    )


def _no_mask(patch: pytest.MonkeyPatch) -> None:
    original = attention.decode_bias
    patch.setattr(attention, "decode_bias", lambda *args: torch.zeros_like(original(*args)))


def _late_position(patch: pytest.MonkeyPatch) -> None:
    original = step.ModelRunner.decode
    patch.setattr(
        step.ModelRunner,
        "decode",
        lambda self, tokens, positions, full_rows, deltas: original(self, tokens, positions + 1, full_rows, deltas),
    )


def _value_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    original = attention.slot_decode_attention

    def mixed(module: Any, query: Tensor, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        values = values.clone()
        values[:, :, 0] = values.roll(1, 0)[:, :, 0]
        return original(module, query, keys, values, *args, **kwargs)

    patch.setattr(attention, "slot_decode_attention", mixed)


def _no_scale(patch: pytest.MonkeyPatch) -> None:
    for name in ("slot_attention", "slot_decode_attention"):
        original = getattr(attention, name)
        unscaled = functools.partial(original)
        patch.setattr(attention, name, lambda *a, _of=unscaled, **k: _of(*a, **k | {"scaling": 1.0}))


def _swapped_norms(patch: pytest.MonkeyPatch) -> None:
    original = step.ModelRunner.forward

    def swapped(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        layer = self.model.model.layers[1]
        layer.input_layernorm, layer.post_attention_layernorm = layer.post_attention_layernorm, layer.input_layernorm
        try:
            return original(self, *args, **kwargs)
        finally:
            norms = layer.post_attention_layernorm, layer.input_layernorm
            layer.input_layernorm, layer.post_attention_layernorm = norms

    patch.setattr(step.ModelRunner, "forward", swapped)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "mutate", [_one_slot_for_all, _no_mask, _late_position, _value_of_a_neighbour, _no_scale, _swapped_norms]
)
def test_mistakes_are_told_from_the_rounding_of_trained_weights(
    mutate: Mutation, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sharp(dtype)
    for number, layer in enumerate(model.model.layers):
        layer.input_layernorm.weight.data *= 1.0 + number
    mutate(monkeypatch)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM is not served.* differ from transformers"):
        GenerationEngine(model)


@pytest.mark.smollm2
def test_a_real_chat_model_is_served_in_bfloat16_and_mistakes_with_it_are_refused(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.bfloat16)
    GenerationEngine(model)
    refused = r"LlamaForCausalLM is not served.* differ from transformers"
    for mutate in (_late_position, _swapped_norms):
        with monkeypatch.context() as wrong:
            mutate(wrong)
            with pytest.raises(UnsupportedModelError, match=refused):
                GenerationEngine(model)


@pytest.mark.parametrize("mutate", [_one_slot_for_all, _no_mask, _late_position])
@pytest.mark.parametrize("spread", SPREADS)
def test_slots_that_are_mixed_up_are_seen(mutate: Mutation, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM is not served.* differ from transformers"):
        GenerationEngine(build("llama", spread))


def test_the_proof_leaves_the_engines_own_cache_empty() -> None:
    engine = GenerationEngine(build("llama"))
    cache = engine._batch.runner.cache
    assert (cache.layout.length, cache.layout.tokens) == (0, 0)


# What only long sequences show.


def test_a_long_neighbour_changes_the_rotary_positions_of_longrope_so_that_it_is_refused() -> None:
    model = build("phi3")
    engine = FlatPolicyEngine(model, temperature=1.0, attention=AttentionKind.packed, tokens_per_micro_batch=99)
    select_attention(engine, AttentionImplementation.sdpa, longest=24)  # short sequences do not show it
    short, long = list(range(9)), [5] * 30
    (alone,), (_, beside) = engine.score_sequences([short]), engine.score_sequences([long, short])
    assert max(abs(a - b) for a, b in zip(alone, beside, strict=True)) > 0.01
    layout_parity.refuse_longer_than_independent(model, 24)
    with pytest.raises(
        UnsupportedModelError, match=r"Phi3ForCausalLM cannot be trained on sequences of 25 .* Use at most 24"
    ):
        layout_parity.refuse_longer_than_independent(model, 25)


def test_the_embedded_engine_refuses_longrope_beyond_its_first_length() -> None:
    GenerationEngine(build("phi3"), max_model_len=24)
    with pytest.raises(UnsupportedModelError, match=r"Phi3ForCausalLM .* Use generation.context_length=24 or less"):
        GenerationEngine(build("phi3"), max_model_len=25)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("model_type", ["phimoe", "qwen2_moe"])
def test_a_window_that_packed_attention_is_not_told_of_is_seen_where_sequences_may_be_longer(
    model_type: str, spread: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(model_type, spread)
    assert settle(model, longest=23) == AttentionKind.tree
    with caplog.at_level(logging.WARNING):
        assert settle(model, longest=24) == AttentionKind.padded
    assert "in rows longer than sliding_window=24, 8 sequences computed together differ" in caplog.text


@pytest.mark.parametrize(("model_type", "kind"), [("qwen2", AttentionKind.tree), ("phi3", AttentionKind.tree)])
def test_a_window_that_it_is_told_of_is_packed(model_type: str, kind: AttentionKind) -> None:
    assert settle(build(model_type), longest=64, row=400) == kind


def test_rows_longer_than_a_table_of_positions_are_not_packed_where_they_go_by_places_in_the_row() -> None:
    model = build("gpt_neo")
    assert settle(model, longest=20, row=127) == AttentionKind.packed
    assert settle(model, longest=20, row=128) == AttentionKind.padded


def test_a_critic_is_proven_beyond_the_lengths_of_its_trunk() -> None:
    critic = FlatValueEngine(
        Critic(build("phimoe").base_model), attention=AttentionKind.packed, tokens_per_micro_batch=16
    )
    select_attention(critic, AttentionImplementation.sdpa, longest=64)
    assert critic.attention == AttentionKind.padded


def plain_and_served(model: PreTrainedModel, length: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a prompt and an answer, by transformers and by the embedded engine."""
    draw = random.Random(0)
    prompt = tuple(draw.randrange(3, 40) for _ in range(length))
    engine = GenerationEngine(model, max_running_requests=2, max_model_len=length + 6)
    engine.eos_token_ids = ()
    future = engine.submit(Job((GenerationInput("a", prompt, SamplingSpec(max_new_tokens=6), prompt_logprobs_from=0),)))
    while engine.step():
        pass
    (output,) = future.result(timeout=0)
    served = torch.tensor([*(output.prompt_logprobs or [])[1:], *output.logprobs])
    return plain_logprobs(model, [*prompt, *output.output_ids]), served


@pytest.mark.parametrize("model_type", ["moshi", "phimoe", "qwen2", "llama4_text"])
def test_the_embedded_engine_serves_a_window_as_the_model_uses_it_whatever_the_config_names(model_type: str) -> None:
    plain, served = plain_and_served(build(model_type), 50)
    torch.testing.assert_close(served, plain, rtol=0, atol=2e-5)


def test_attention_in_chunks_is_trained_on_padded_rows() -> None:
    assert settle(build("llama4_text"), longest=64, row=400) == AttentionKind.padded


def test_a_context_beyond_a_length_that_an_engine_cannot_keep_to_is_refused_by_the_fields_name() -> None:
    """Llama 4 scales queries by the place in the row, which of a decoded token is always the first."""
    GenerationEngine(build("llama4_text", floor_scale=40, attn_scale=2.0), max_model_len=39)
    reason = r"in rows longer than .*floor_scale=40.* Use generation.context_length="
    with pytest.raises(UnsupportedModelError, match=reason):
        GenerationEngine(build("llama4_text", floor_scale=40, attn_scale=2.0), max_model_len=40)


@pytest.mark.parametrize("model_type", ["minicpm3", "modernbert-decoder"])
def test_logits_are_made_by_a_factor_of_the_config_or_by_a_head_of_several_layers(model_type: str) -> None:
    assert settle(build(model_type)) == AttentionKind.tree


# The comparison itself.


def test_probes_are_of_the_vocabulary_within_the_context_and_of_two_halves() -> None:
    sequences = probe_sequences(10, context=9)
    assert [len(tokens) for tokens in sequences] == [9, 9, 9, 7]
    assert {token for tokens in sequences[::2] for token in tokens} <= set(range(5))
    assert {token for tokens in sequences[1::2] for token in tokens} <= set(range(5, 10))
    assert probe_sequences(10, context=9) == sequences


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_is_a_difference(dtype: torch.dtype) -> None:
    plain = [torch.zeros(3)]
    assert Difference.of(plain, plain).beyond(Rounding.least(dtype)) is None
    assert Difference.of(plain, [torch.tensor([0.0, float("nan"), 0.0])]).beyond(Rounding.least(dtype)) is not None


def test_an_output_that_does_not_depend_on_its_tokens_proves_nothing() -> None:
    embedding = nn.Embedding(10, 4)

    class Model:
        def get_input_embeddings(self) -> nn.Module:
            return embedding

    def together(sequences: Any) -> list[Tensor]:
        return [embedding(torch.tensor(tokens)).sum(-1) * 0.0 for tokens in sequences]

    fault = layout_parity.find_leak(Model(), probe_sequences(10), together)  # type: ignore[arg-type]
    assert fault is not None
    assert "no gradient by its own tokens" in fault
