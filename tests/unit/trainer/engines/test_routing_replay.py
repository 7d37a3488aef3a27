"""The trainer goes through the experts that the engine chose, with weights of its own, whatever its routers prefer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device, Dtype
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.engine_io import GenerationInput, SamplingSpec
from asyncrl.models.model_config import ROUTERS, UNRECORDED
from asyncrl.models.parity import UnsupportedModelError
from asyncrl.models.routing import Routers
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.engines.base import PolicyOutputs
from asyncrl.trainer.engines.flat import FlatLoader, FlatPolicyEngine
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.rank.training_rank import TrainingRank
from asyncrl.trainer.settings import AttentionImplementation
from tests.engine_steps import run

LAYERS, EXPERTS, PER_TOKEN, VOCABULARY = 2, 5, 2, 32
PROMPT = (5, 6, 7)
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen2_moe": {"num_experts": EXPERTS, "shared_expert_intermediate_size": 8},
    "qwen3_moe": {"num_experts": EXPERTS, "norm_topk_prob": True},
    "olmoe": {"num_experts": EXPERTS},
    "gpt_oss": {"num_local_experts": EXPERTS, "layer_types": ["full_attention"] * LAYERS},
}


def build(kind: str, **settings: Any) -> PreTrainedModel:
    """A tiny model whose routers are decided, and whose experts differ."""
    torch.manual_seed(0)
    shape = CONFIG_MAPPING[kind](
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts_per_tok=PER_TOKEN,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
        **{**KINDS[kind], **settings},
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(shape, attn_implementation="eager")  # type: ignore[no-untyped-call]
    model.train(False)
    for name, parameter in model.named_parameters():
        if "router" in name or ".gate." in name:
            nn.init.normal_(parameter, std=0.5)
    return model


@contextmanager
def hooked(model: PreTrainedModel, choices_ILK: Tensor) -> Iterator[None]:
    """Experts forced in transformers' own model, by the published formula and without the code under test: a hook puts
    them, and the trainer's probabilities of them renormalised, in the place of what each router gives.
    """
    handles = []
    for layer, router in enumerate(m for m in model.modules() if type(m).__name__ in ROUTERS.values()):

        def force(module: nn.Module, inputs: Any, output: Any, layer: int = layer) -> Any:
            logits, scores, _ = output
            chosen = choices_ILK[:, layer].long()
            weights = logits.gather(-1, chosen).float().softmax(-1)
            if getattr(module, "norm_topk_prob", True) is False:
                weights = logits.float().softmax(-1).gather(-1, chosen)
            return logits, weights.to(scores.dtype), chosen

        handles.append(router.register_forward_hook(force))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def plain(model: PreTrainedModel, tokens: Tensor, choices: Tensor | None = None) -> Tensor:
    """Log-probabilities [T] of one sequence, 0 at its first token, by transformers alone."""
    if choices is None:
        logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
    else:
        with hooked(model, choices[:-1]):
            logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
    chosen = logits.float().log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return F.pad(chosen, (1, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_router_replays_its_choices_and_others(kind: str) -> None:
    model = build(kind)
    tokens = torch.randint(0, VOCABULARY, (1, 11))
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    untouched, routers = copy.deepcopy(model), Routers(model.base_model, kind)
    with torch.no_grad(), routers.recording() as recorded:
        torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=0, atol=0)
    own = torch.stack([recorded[layer] for layer in range(LAYERS)], dim=1)
    with torch.no_grad(), routers.router_replay(own):
        torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=0, atol=1e-6)
        found = model(input_ids=tokens).logits
    with torch.no_grad(), routers.router_replay(torch.full_like(own, UNRECORDED)):
        torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=0, atol=0)
    other = torch.stack([torch.randperm(EXPERTS)[:PER_TOKEN] for _ in range(11 * LAYERS)]).view(11, LAYERS, PER_TOKEN)
    with hooked(untouched, other):
        forced = untouched(input_ids=tokens).logits
    with routers.router_replay(other.to(torch.int16)):
        found = model(input_ids=tokens).logits
    assert (forced - expected).abs().max() > 0.1
    torch.testing.assert_close(found, forced, rtol=0, atol=2e-5)
    torch.autograd.backward(forced.sin().sum())
    torch.autograd.backward(found.sin().sum())
    grads = dict(untouched.named_parameters())
    for name, parameter in model.named_parameters():
        its = grads[name].grad
        if its is None:
            assert parameter.grad is None
            continue
        torch.testing.assert_close(cast(Tensor, parameter.grad), its, rtol=1e-4, atol=1e-4)
        if "router" in name or ".gate." in name:
            assert its.abs().max() > 1e-3, "the trainer's routers learn"


def test_a_model_without_known_routers_is_refused_by_name(qwen_dir: Path) -> None:
    dense = AutoModelForCausalLM.from_pretrained(str(qwen_dir))
    with pytest.raises(UnsupportedModelError, match="Qwen2ForCausalLM has no routers whose choices can be replayed"):
        Routers(dense, "qwen2")


def test_a_router_that_chooses_otherwise_is_refused() -> None:
    model = build("mixtral")
    router = next(m for m in model.modules() if type(m).__name__ == "MixtralTopKRouter")
    original = router.forward
    router.forward = lambda hidden: (torch.topk(hidden, 1), original(hidden))[1]
    routers = Routers(model, "mixtral")
    with pytest.raises(UnsupportedModelError, match="calls topk 2 times, not once"), routers.recording():
        model(input_ids=torch.ones(1, 2, dtype=torch.long))


def generated(model: PreTrainedModel, count: int = 12, prompts: Sequence[tuple[int, ...]] = (PROMPT,)) -> StepBatch:
    """Answers of the embedded engine, with what it says of them."""
    engine = GenerationEngine(copy.deepcopy(model), record_routing=True)
    inputs = [
        GenerationInput(f"r{i}", prompts[i % len(prompts)], SamplingSpec(max_new_tokens=10, seed=i), routing_from=0)
        for i in range(count)
    ]
    samples = []
    for request, output in zip(inputs, run(engine, *inputs), strict=True):
        prompt = len(request.input_ids)
        tokens = np.array([*request.input_ids, *output.output_ids], np.int32)
        mask = (np.arange(len(tokens)) >= prompt).astype(np.uint8)
        assert output.routing is not None
        routing = np.full((len(tokens), LAYERS, PER_TOKEN), 255, np.uint8)
        routing[:-1] = output.routing
        samples.append(
            Sample(
                tokens=tokens,
                loss_mask=mask,
                behave_logprobs=np.array([0.0] * prompt + list(output.logprobs), np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                reward=float(len(samples) % 2),
                routing=routing,
            )
        )
    return batch_of(samples)


def batch_of(samples: Sequence[Sample]) -> StepBatch:
    return build_step_batch([Trajectory("r", "p", 0, tuple(samples))], [0], version=0, num_minibatches=1)


def policy(model: PreTrainedModel, tmp_path: Path, *, replay: bool = True, **settings: Any) -> FlatPolicyEngine:
    """`model` as a run with these settings trains it."""
    model.save_pretrained(str(tmp_path))
    config = ExperimentConfig()
    config.model.path, config.trainer.device = str(tmp_path), Device.cpu
    config.moe.replay_routing = replay
    config.trainer.tokens_per_micro_batch = settings.pop("budget", 64)
    config.trainer.share_prefixes = settings.pop("share", True)
    config.trainer.gradient_checkpointing = settings.pop("checkpointing", False)
    config.model.attn_implementation = settings.pop("attention", AttentionImplementation.sdpa)
    assert not settings
    return FlatLoader(config, RankPosition(), torch.device("cpu")).policy(
        str(tmp_path), Dtype.float32, config.optimizer
    )


def perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """The same with routers that prefer other experts."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "router" in name or ".gate." in name:
                parameter.add_(torch.randn_like(parameter) * 0.5)
    return other


def test_a_layer_that_is_computed_without_its_router_is_refused() -> None:
    model = build("mixtral")
    block = next(m for m in model.modules() if type(m).__name__ == "MixtralSparseMoeBlock")
    block.forward = lambda hidden: hidden  # as a kernel in the place of the whole block
    routers = Routers(model, "mixtral")
    refused = pytest.raises(UnsupportedModelError, match=r"the routers of layers \[0\] of Mixtral.* were not asked")
    with refused, routers.recording():
        model(input_ids=torch.ones(1, 2, dtype=torch.long))


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_replayed_log_probabilities_are_the_plain_ones(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    batch = generated(model)
    found = policy(model, tmp_path).logprobs(batch, batch["loss_mask"])
    expected = policy(model, tmp_path, replay=False).logprobs(batch, batch["loss_mask"])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(found, batch["behave_logprobs"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, AttentionKind.tree),
        ({"share": False}, AttentionKind.packed),
        ({"attention": AttentionImplementation.eager}, AttentionKind.padded),
    ],
    ids=["tree", "packed", "padded"],
)
def test_a_perturbed_router_follows_the_engine_in_every_layout(
    settings: dict[str, Any], kind: AttentionKind, tmp_path: Path
) -> None:
    """As transformers computes the perturbed model with the engine's experts put in the place of its own."""
    model = build("qwen3_moe")
    batch, other = generated(model, prompts=[PROMPT, (9, 8, 7, 6)]), perturbed(model)
    with torch.no_grad():
        reported = batch.routing
        assert reported is not None
        parts = zip(
            batch["tokens"].split(batch.lengths_S.tolist()), reported.split(batch.lengths_S.tolist()), strict=True
        )
        expected = torch.cat([plain(other, tokens, choices) for tokens, choices in parts])
        free = torch.cat([plain(other, tokens) for tokens in batch["tokens"].split(batch.lengths_S.tolist())])
    expected, free = expected * batch["loss_mask"], free * batch["loss_mask"]
    engine = policy(other, tmp_path, **settings)
    assert engine.attention == kind
    found = engine.logprobs(batch, batch["loss_mask"])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found - free).abs().max() > 0.1, "its own routers choose others"


def test_a_bfloat16_engine_is_followed(tmp_path: Path) -> None:
    """Its rounding chooses other experts now and then; of these the trainer has the log-probabilities, in fp32."""
    model = build("mixtral")
    batch = generated(cast(PreTrainedModel, copy.deepcopy(model).to(torch.bfloat16)), count=32)  # type: ignore[arg-type]
    engine = policy(model, tmp_path)
    found = engine.logprobs(batch, batch["loss_mask"])
    engine.routers = None
    free = engine.logprobs(batch, batch["loss_mask"])
    behave = batch["behave_logprobs"]
    assert (free - found).abs().max() > 0.05, "rounding changed no choice: this test shows nothing"
    assert (found - behave).abs().mean() < 0.8 * (free - behave).abs().mean()


def gradients(engine: FlatPolicyEngine, batch: StepBatch) -> Tensor:
    """Return the gradients of the mean of all log-probabilities."""

    def share(micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, Any]]:
        return outputs.logprobs_N.mean() * len(outputs.logprobs_N) / float(batch["loss_mask"].sum()), {}

    engine.compute_gradients(batch, batch["loss_mask"], range(batch.num_seqs), share)
    return engine.optimizer.grad.clone()


def test_gradients_do_not_depend_on_the_cut_or_on_recomputation(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    batch, other = generated(model), perturbed(model)
    expected = gradients(policy(other, tmp_path, share=False, budget=10_000), batch)
    assert expected.abs().max() > 0.01
    for settings in ({}, {"budget": 30}, {"checkpointing": True, "budget": 30}):
        torch.testing.assert_close(gradients(policy(other, tmp_path, **settings), batch), expected, rtol=0, atol=2e-6)


def test_a_layer_that_is_recomputed_replays_its_own_micro_batch(tmp_path: Path) -> None:
    """As in a pipeline, where other micro-batches run before a backward pass."""
    model = build("qwen3_moe")
    batch, other = generated(model), perturbed(model)
    kept, again = policy(other, tmp_path), policy(other, tmp_path, checkpointing=True)
    found = []
    for engine in (kept, again):
        engine.optimizer.zero_grad()
        losses = [engine.outputs_of(part)[0].sum() for part in engine.micro_batches(batch, batch["loss_mask"])]
        for loss in losses:
            torch.autograd.backward(loss)
        found.append(engine.optimizer.grad.clone())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_equal_tokens_are_shared_as_far_as_their_experts_are_equal(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    first = generated(model, count=1)
    rows = first.routing
    assert rows is not None
    length = int(first.lengths_S[0])
    sample = Sample(
        tokens=first["tokens"].numpy().astype(np.int32),
        loss_mask=first["loss_mask"].numpy().astype(np.uint8),
        behave_logprobs=first["behave_logprobs"].numpy(),
        versions=first["versions"].numpy().astype(np.int32),
        reward=0.0,
        routing=np.where(rows.numpy() == UNRECORDED, 255, rows.numpy()).astype(np.uint8),
    )
    assert sample.routing is not None
    changed = sample.routing.copy()
    changed[5, 0] = [each for each in range(EXPERTS) if each not in changed[5, 0]][:PER_TOKEN]
    batch = batch_of([sample, sample, replace(sample, routing=changed)])
    assert batch.prefixes.order.branches([0, 1], batch.lengths_S).tokens == length
    assert batch.prefixes.order.branches([0, 1, 2], batch.lengths_S).tokens == 2 * length - 5
    found = policy(model, tmp_path).logprobs(batch, batch["loss_mask"]).view(3, -1)
    expected = policy(model, tmp_path, share=False).logprobs(batch, batch["loss_mask"]).view(3, -1)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert (found[0] - found[2]).abs().max() > 1e-3


@pytest.mark.parametrize("lora", [0, 2])
def test_the_reference_chooses_for_itself(lora: int, tmp_path: Path, make_rank: Any) -> None:
    """It is a policy of its own: with adapters the actor's base, which the actor replays and the reference does not."""
    model = build("qwen3_moe")
    batch, other = generated(model), perturbed(model)
    other.save_pretrained(str(tmp_path))
    config = ExperimentConfig()
    config.model.path, config.trainer.device, config.moe.replay_routing = str(tmp_path), Device.cpu, True
    config.model.lora.rank = lora
    config.algorithm.kl_coef = 0.1
    rank: TrainingRank = make_rank(config)
    expected = policy(other, tmp_path, replay=False).logprobs(batch, batch["loss_mask"])
    reference, actor = (rank.policy(role).logprobs(batch, batch["loss_mask"]) for role in ("ref", "actor"))
    torch.testing.assert_close(reference, expected, rtol=0, atol=1e-6)
    assert (actor - reference).abs().max() > 0.1
