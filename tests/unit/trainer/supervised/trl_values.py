"""Losses and gradients of TRL 1.16 on fixed pairs, which `test_preferences` expects of asyncrl's.

    pip install torch==2.13.0 trl==1.16.0
    python tests/unit/trainer/supervised/trl_values.py

writes `trl_values.json` beside this file. TRL's own `compute_loss` of its trainers runs, on a model whose weights are a
formula; only what surrounds it in a trainer (accelerator, metrics) is a stand-in.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel, Qwen2Config

FILE = Path(__file__).with_suffix(".json")
VOCABULARY = 17
PAIRS: list[tuple[list[int], list[int], list[int], float]] = [
    ([3, 7, 5], [9, 4, 1], [8, 1], 0.5),
    ([6, 2], [11, 12, 13, 1], [5, 5, 1], 0.0),
    ([14, 3, 3, 8], [2, 1], [16, 15, 4, 1], 1.0),
]
"""Prompt, chosen and rejected answer, margin."""
BETA = 0.3
CENTRING = 0.01
WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.5}


def config(**more: Any) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **more,
    )


def filled(model: PreTrainedModel, phase: float) -> PreTrainedModel:
    """`model` with weights that are a formula of their names' order; norms stay 1."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
            if "norm" not in name:
                places = torch.arange(parameter.numel(), dtype=torch.float64)
                values = 0.4 * torch.sin(1.7 * places + 0.9 * number + phase + 0.001 * places.square() % 5.0)
                parameter.copy_(values.view_as(parameter))
    model.train(False)
    return model


def policy(phase: float = 0.0) -> PreTrainedModel:
    return filled(AutoModelForCausalLM.from_config(config()), phase)


def reward_model() -> PreTrainedModel:
    return filled(AutoModelForSequenceClassification.from_config(config(num_labels=1)), 0.0)


def norm(model: PreTrainedModel) -> float:
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.cat([grad.flatten() for grad in grads]).norm())


def padded(sequences: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    """Prompts and answers as TRL's collators lay them out: padded on the right, with a mask of the answers."""
    longest = max(len(prompt) + len(answer) for prompt, answer in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    attention, answers = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(sequences):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        attention[row, :end] = 1
        answers[row, len(prompt) : end] = 1
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": answers}


class WithLogprobs:
    """A model that returns what TRL's patched forward does: 0 where the label is -100."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.training, self.is_gradient_checkpointing = model, True, False

    def __call__(self, *, labels: Tensor, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        wanted = labels[:, 1:]
        every = logits.log_softmax(-1).gather(-1, wanted.clamp(min=0)[..., None]).squeeze(-1)
        nothing = torch.zeros_like(every)
        return SimpleNamespace(
            log_probs=every.masked_fill(wanted == -100, 0.0),
            entropy=nothing,
            mean_logits=nothing,
            is_top1=nothing.bool(),
            logits=logits,
        )


def trainer(model: Any, reference: Any, **more: Any) -> Any:
    """Stand-in for a trainer, with what its loss reads."""
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x)
    return SimpleNamespace(
        accelerator=accelerator,
        model=model,
        ref_model=reference,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        aux_loss_enabled=False,
        **more,
    )


def of_reward_model() -> dict[str, float]:
    from trl import RewardTrainer

    model = reward_model()
    model.training = True
    pairs = [(p, c) for p, c, _, _ in PAIRS] + [(p, r) for p, _, r, _ in PAIRS]
    inputs = padded(pairs)
    del inputs["completion_mask"]
    margin = torch.tensor([m for *_, m in PAIRS])
    stand_in = trainer(model, None, args=SimpleNamespace(center_rewards_coefficient=CENTRING))
    loss: Tensor = RewardTrainer.compute_loss(stand_in, model, {**inputs, "margin": margin})
    loss.backward()
    metrics = {name: stand_in._metrics["train"][name][-1] for name in ("accuracy", "margin")}
    return {"loss": loss.item(), "grad_norm": norm(model), **metrics}


def of_dpo(loss_type: str) -> dict[str, float]:
    from trl import DPOTrainer

    model, reference = WithLogprobs(policy(0.2)), WithLogprobs(policy())
    pairs = [(p, c) for p, c, _, _ in PAIRS] + [(p, r) for p, _, r, _ in PAIRS]
    stand_in = trainer(
        model,
        reference,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=BETA,
        label_smoothing=0.0,
        use_weighting=False,
    )
    loss = DPOTrainer._compute_loss(stand_in, model, padded(pairs), False)
    loss.backward()
    metrics = stand_in._metrics["train"]
    margin = metrics["rewards/margins"][-1] / BETA
    return {
        "loss": loss.item(),
        "grad_norm": norm(model.model),
        "accuracy": metrics["rewards/accuracies"][-1],
        "margin": margin,
    }


def of_kto() -> dict[str, float]:
    from trl import KTOTrainer

    model, reference = WithLogprobs(policy(0.2)), WithLogprobs(policy())
    answers = [(p, a, label) for p, c, r, _ in PAIRS for a, label in ((c, True), (r, False))]
    others = [(p, answers[(n + 1) % len(answers)][1]) for n, (p, _, _) in enumerate(answers)]
    inputs: dict[str, Any] = padded([(p, a) for p, a, _ in answers])
    inputs |= {f"KL_{name}": value for name, value in padded(others).items()}
    inputs["label"] = torch.tensor([label for *_, label in answers])
    stand_in = trainer(
        model,
        reference,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        calculate_KL=True,
        precompute_ref_logps=False,
        loss_type="kto",
        beta=BETA,
        **WEIGHTS,
    )
    stand_in._compute_kl_logps = lambda *args: KTOTrainer._compute_kl_logps(stand_in, *args)
    loss = KTOTrainer._compute_loss(stand_in, model, inputs, False)
    loss.backward()
    return {"loss": loss.item(), "grad_norm": norm(model.model), "kl": stand_in._metrics["train"]["kl"][-1]}


if __name__ == "__main__":
    values = {"bradley_terry": of_reward_model(), "dpo": of_dpo("sigmoid"), "ipo": of_dpo("ipo"), "kto": of_kto()}
    FILE.write_text(f"{json.dumps(values, indent=2)}\n")
