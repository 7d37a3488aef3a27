"""The engine's numbers are those of a plain forward pass, however sequences are packed and cut."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, MistralConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.models.chunked_logprobs import EntropyMode
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines import role
from asyncrl.trainer.engines.base import PolicyOutputs
from asyncrl.trainer.engines.flat import FlatOptimizer, FlatPolicyEngine, FlatValueEngine
from asyncrl.trainer.model import layers as model_layers
from asyncrl.trainer.model.layers import checkpoint_layers
from asyncrl.trainer.model.layout_parity import first_layout
from asyncrl.trainer.model.load_models import load_causal_lm
from asyncrl.trainer.model.value_models import load_critic
from asyncrl.trainer.settings import OptimizerConfig

from ....late_stream import LateStream

MakeBatch = Callable[..., StepBatch]
CPU = torch.device("cpu")


def engine(  # type: ignore[no-untyped-def]
    path: Path,
    *,
    attn: str = "sdpa",
    budget: int = 64,
    temperature: float = 1.0,
    train: bool = False,
    checkpointing: bool = False,
    on_host: bool = False,
):
    model = load_causal_lm(path, "float32", attn, CPU)
    return FlatPolicyEngine(
        model,
        temperature=temperature,
        attention=first_layout(attn).kind,
        tokens_per_micro_batch=budget,
        optimizer=FlatOptimizer(model.named_parameters(), OptimizerConfig()) if train else None,
        gradient_checkpointing=checkpointing,
        activations_on_host=on_host,
    )


def plain_logprobs(path: Path, batch: StepBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of all tokens but first ones, sequence by sequence, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(str(path), attn_implementation="eager").double()
    logprobs, entropies = [], []
    with torch.no_grad():
        for tokens in batch["tokens"].split(batch.lengths_S.tolist()):
            all_LV = (model(input_ids=tokens[None]).logits[0] / temperature).log_softmax(-1)
            chosen = all_LV[:-1].gather(-1, tokens[1:, None])[:, 0]
            entropy = -(all_LV.exp() * all_LV).sum(-1)[:-1]
            logprobs += [torch.zeros(1), chosen.float()]
            entropies += [torch.zeros(1), entropy.float()]
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("model", ["qwen_dir", "llama_dir"])
@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_logprobs_are_those_of_a_plain_forward_pass(
    model: str, attn: str, budget: int, make_batch: MakeBatch, request: pytest.FixtureRequest
) -> None:
    path, batch = request.getfixturevalue(model), make_batch()
    expected, _ = plain_logprobs(path, batch, temperature=0.7)
    got = engine(path, attn=attn, budget=budget, temperature=0.7).logprobs(batch, batch["loss_mask"])
    torch.testing.assert_close(got, torch.where(batch["loss_mask"], expected, 0), rtol=0, atol=2e-6)


def test_a_sliding_window_hides_what_is_too_old(tmp_path: Path, make_batch: MakeBatch) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        vocab_size=17,
        sliding_window=4,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(str(tmp_path))
    batch = make_batch()
    expected, _ = plain_logprobs(tmp_path, batch)
    got = engine(tmp_path).logprobs(batch, batch["loss_mask"])
    torch.testing.assert_close(got, torch.where(batch["loss_mask"], expected, 0), rtol=0, atol=2e-6)


def test_entropies_are_those_of_a_plain_forward_pass(qwen_dir: Path, make_batch: MakeBatch) -> None:
    batch = make_batch()
    _, expected = plain_logprobs(qwen_dir, batch)
    policy = engine(qwen_dir)
    for micro_batch in policy.micro_batches(batch, batch["loss_mask"]):
        entropy = policy.outputs_of(micro_batch, entropy=EntropyMode.constant)[1]
        assert entropy is not None
        torch.testing.assert_close(entropy, expected[micro_batch.targets_N], rtol=0, atol=2e-6)
        assert not entropy.requires_grad


def test_only_what_is_needed_goes_into_the_model(qwen_dir: Path, make_batch: MakeBatch) -> None:
    batch = make_batch()
    wanted_T = torch.zeros(batch.num_tokens, dtype=torch.bool)
    wanted_T[batch.starts_S[3] + 2] = True  # the third token of the fourth sample
    (micro_batch,) = engine(qwen_dir).micro_batches(batch, wanted_T)
    assert micro_batch.seqs == [3]
    assert micro_batch.model_inputs["input_ids"].shape == (1, 2)
    assert micro_batch.tokens_N.tolist() == [batch["tokens"][batch.starts_S[3] + 2].item()]


def test_all_micro_batches_are_laid_out_before_the_first_is_computed(
    qwen_dir: Path, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a GPU need not wait for the layout of the next one; those that are computed are let go."""
    batch, events, made = make_batch(), [], []
    lay_out = role.micro_batches

    def observed(*args: Any, **options: Any) -> Iterator[MicroBatch]:
        for micro_batch in lay_out(*args, **options):
            events.append("laid out")
            made.append(weakref.ref(micro_batch))
            yield micro_batch

    monkeypatch.setattr(role, "micro_batches", observed)
    policy = engine(qwen_dir, budget=40, train=True)

    def share(_: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        events.append("computed")
        assert sum(each() is not None for each in made) == len(made) - events.count("computed") + 1
        return outputs.logprobs_N.sum(), {}

    policy.compute_gradients(batch, batch["loss_mask"], range(batch.num_seqs), share)
    count = len(made)
    assert count > 1
    assert events == ["laid out"] * count + ["computed"] * count


def test_a_first_token_cannot_be_scored(qwen_dir: Path, make_batch: MakeBatch) -> None:
    batch = make_batch()
    with pytest.raises(ValueError, match="first token"):
        engine(qwen_dir).logprobs(batch, torch.ones(batch.num_tokens, dtype=torch.bool))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_gradients_do_not_depend_on_the_cut(qwen_dir: Path, make_batch: MakeBatch, attn: str) -> None:
    batch = make_batch(groups=6, minibatches=1)
    weights_T = torch.linspace(-1, 1, batch.num_tokens)
    gradients = []
    for budget in (1, 37, 10_000):
        policy = engine(qwen_dir, attn=attn, budget=budget, train=True)

        def share(micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, object]]:
            assert outputs.entropy_N is not None
            return (outputs.logprobs_N * weights_T[micro_batch.targets_N] + 0.1 * outputs.entropy_N).sum(), {}

        policy.compute_gradients(
            batch, batch["loss_mask"], range(batch.num_seqs), share, entropy=EntropyMode.differentiable
        )
        gradients.append(policy.optimizer.grad.clone())
    scale = gradients[0].abs().max()
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient / scale, gradients[0] / scale, rtol=0, atol=2e-6)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("model", ["qwen_dir", "llama_dir"])
def test_gradient_checkpointing_gives_equal_gradients_and_keeps_less(
    model: str, attn: str, make_batch: MakeBatch, request: pytest.FixtureRequest
) -> None:
    path, batch = request.getfixturevalue(model), make_batch()
    gradients, kept = [], []
    for checkpointing in (False, True):
        policy = engine(path, attn=attn, budget=10_000, train=True, checkpointing=checkpointing)
        assert not any(module.training for module in policy.module.modules())  # so dropout stays off
        saved: dict[int, int] = {}

        def note(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        def share(micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, object]]:
            return outputs.logprobs_N.square().sum(), {}

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss, _ = policy.compute_gradients(batch, batch["loss_mask"], range(batch.num_seqs), share)
        gradients.append((loss, policy.optimizer.grad.clone()))
        kept.append(sum(saved.values()))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])
    assert kept[1] < 0.8 * kept[0]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_inputs_of_layers_that_wait_on_the_host_leave_the_device_and_come_back_with_the_same_bits(
    llama_dir: Path, make_batch: MakeBatch, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where copies are late, as on a GPU's stream of its own, and with several micro-batches."""
    if late:
        monkeypatch.setattr(model_layers, "HostCopies", LateStream().copies)
    batch, gradients, alive = make_batch(), [], []
    for on_host in (False, True):
        policy = engine(llama_dir, budget=60, train=True, checkpointing=True, on_host=on_host)
        inputs: list[StorageWeakRef] = []
        layers = [each for each in policy.module.modules() if isinstance(each, GradientCheckpointingLayer)]
        for layer in layers:
            layer.register_forward_pre_hook(
                lambda _, args, inputs=inputs: inputs.append(StorageWeakRef(args[0].untyped_storage()))
            )

        def share(
            micro_batch: MicroBatch, outputs: PolicyOutputs, inputs: list[StorageWeakRef] = inputs
        ) -> tuple[Tensor, dict[str, object]]:
            alive.append([not each.expired() for each in inputs])
            inputs.clear()
            return outputs.logprobs_N.square().sum(), {}

        loss, _ = policy.compute_gradients(batch, batch["loss_mask"], range(batch.num_seqs), share)
        gradients.append((loss, policy.optimizer.grad.clone()))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])
    micro_batches = len(alive) // 2
    assert micro_batches > 1
    assert len(layers) > 1
    assert alive[:micro_batches] == [[True] * len(layers)] * micro_batches
    assert alive[micro_batches:] == [[False] * (len(layers) - 1) + [True]] * micro_batches


def test_a_layer_that_changes_its_input_is_refused_if_that_is_copied_meanwhile() -> None:
    class Changing(GradientCheckpointingLayer):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.add_(1.0).square()

    trunk = torch.nn.Sequential(Changing(), Changing())
    checkpoint_layers(trunk, on_host=True)
    with pytest.raises(RuntimeError, match=r"changed its input.*activations_on=device"):
        trunk(torch.ones(2, requires_grad=True) * 1.0)


def test_gradient_checkpointing_of_a_critic_gives_equal_gradients(llama_dir: Path, make_batch: MakeBatch) -> None:
    batch, gradients = make_batch(), []
    for checkpointing in (False, True):
        critic = load_critic(llama_dir, "float32", "sdpa", CPU)
        torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(2))
        values = FlatValueEngine(
            critic,
            attention=AttentionKind.packed,
            tokens_per_micro_batch=50,
            optimizer=FlatOptimizer(critic.named_parameters(), OptimizerConfig()),
            gradient_checkpointing=checkpointing,
        )
        values.compute_gradients(
            batch, batch["loss_mask"], range(batch.num_seqs), lambda _, values_N: (values_N.square().sum(), {})
        )
        gradients.append(values.optimizer.grad.clone())
    assert gradients[0].abs().max() > 0
    assert torch.equal(*gradients)


def test_a_model_without_layers_to_recompute_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="no layer of Linear"):
        checkpoint_layers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_critic_values_every_prefix(llama_dir: Path, make_batch: MakeBatch, attn: str) -> None:
    batch = make_batch()
    critic = load_critic(llama_dir, "float32", attn, CPU)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(2))
    values = FlatValueEngine(critic, attention=first_layout(attn).kind, tokens_per_micro_batch=50)
    outputs_T = values.outputs(batch)
    plain = load_critic(llama_dir, "float32", "eager", CPU)
    plain.head.load_state_dict(critic.head.state_dict())
    with torch.no_grad():
        expected = [
            plain.values(plain.trunk(input_ids=tokens[None]).last_hidden_state[0])
            for tokens in batch["tokens"].split(batch.lengths_S.tolist())
        ]
    torch.testing.assert_close(outputs_T, torch.cat(expected), rtol=1e-4, atol=1e-5)
    for micro_batch in values.micro_batches(batch, batch["loss_mask"]):
        (before_N,) = values.outputs_of(micro_batch)  # the value of a token's prefix is the output one position earlier
        torch.testing.assert_close(before_N, outputs_T[micro_batch.targets_N - 1], rtol=1e-4, atol=1e-5)


def test_an_untrained_critic_predicts_zero(qwen_dir: Path, make_batch: MakeBatch) -> None:
    critic = load_critic(qwen_dir, "float32", "sdpa", CPU)
    values = FlatValueEngine(critic, attention=AttentionKind.packed, tokens_per_micro_batch=50)
    assert values.outputs(make_batch()).abs().sum() == 0


def test_a_frozen_role_cannot_be_trained(qwen_dir: Path) -> None:
    policy = engine(qwen_dir)
    assert not policy.trained
    assert not any(parameter.requires_grad for parameter in policy.module.parameters())
    with pytest.raises(RuntimeError, match="frozen"):
        policy.step(1e-4)
