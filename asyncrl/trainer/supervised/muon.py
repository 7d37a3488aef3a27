"""Training with Muon: the whole model in one process, on padded rows. It makes the demos' base models.

Three things make it fast on a CPU:

- Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) moves the weight matrices: its orthogonalised
  updates need about a third of AdamW's steps here. Embeddings and norms use AdamW, because Muon is not made for them.
- A batch is drawn at random, then cut into micro-batches of similar length whose gradients add up to the batch's own.
  So padding costs little, and the optimizer still sees random batches (batches of one length learn worse).
- Only the answer's positions go through the output layer and the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel, get_cosine_with_min_lr_schedule_with_warmup

from asyncrl.models.host_copies import upload
from asyncrl.plugins.datasets.supervised.demonstration_rows import by_length
from asyncrl.plugins.datasets.supervised.demonstrations import Demonstration
from asyncrl.trainer.supervised.objectives import Measures
from asyncrl.trainer.supervised.settings import SFTConfig


class MuonLearner:
    """Trains a model with Muon for `total` steps.

    Attributes:
        steps_done: always 0: there are no checkpoints to resume from.
    """

    def __init__(self, model: PreTrainedModel, config: SFTConfig, total: int) -> None:
        self.steps_done = 0
        self._model, self._config = model, config
        self._optimizers = _optimizers(model, config)
        self._schedulers = [
            get_cosine_with_min_lr_schedule_with_warmup(
                optimizer, config.warmup_steps, total, min_lr_rate=config.min_lr_share
            )
            for optimizer in self._optimizers
        ]
        model.train()

    def learn(self, batch: Sequence[Demonstration]) -> Measures:
        """Take a step on `batch`. Return the mean loss of `batch` before the step.

        Raises:
            FloatingPointError: the gradient is not finite.
        """
        loss = self._accumulate_gradients(batch)
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.max_grad_norm or math.inf)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {float(norm)}; lower lr and adamw_lr")
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in self._schedulers:
            scheduler.step()
        return Measures(loss)

    def measure(self, batch: Sequence[Demonstration]) -> Measures:
        """Return the mean loss of `batch`."""
        self._model.train(False)
        with torch.no_grad():
            runs = by_length([len(item.token_ids) for item in batch], self._config.tokens_per_micro_batch)
            losses = [_answer_loss(self._model, [batch[i] for i in run]) for run in runs]
        self._model.train()
        return Measures(_total(losses) / sum(item.answer_length for item in batch))

    def complete(self, step: int) -> None:
        """Do nothing: steps are not saved."""

    def _accumulate_gradients(self, batch: Sequence[Demonstration]) -> float:
        """Run the backward pass of the batch's mean loss per answer token; return the mean."""
        answer_tokens = sum(item.answer_length for item in batch)
        losses = []
        for run in by_length([len(item.token_ids) for item in batch], self._config.tokens_per_micro_batch):
            loss = _answer_loss(self._model, [batch[i] for i in run]) / answer_tokens
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        return _total(losses)


def _total(losses: Sequence[Tensor]) -> float:
    """Return the sum of the micro-batches' losses; the host waits for the device once."""
    return float(torch.stack(list(losses)).double().sum())


def _answer_loss(model: PreTrainedModel, demonstrations: Sequence[Demonstration]) -> Tensor:
    """Return the summed cross entropy of the answers' tokens.

    Padding is on the right, where causal attention ignores it.
    """
    longest = max(len(item.token_ids) for item in demonstrations)
    tokens_BL = np.zeros((len(demonstrations), longest), np.int64)
    answer_BL = np.zeros((len(demonstrations), longest), np.bool_)
    for row, item in enumerate(demonstrations):
        tokens_BL[row, : len(item.token_ids)] = item.token_ids
        answer_BL[row, : len(item.token_ids)] = item.loss_mask
    predictors_A = np.flatnonzero(answer_BL[:, 1:])
    arrays = {
        "inputs": tokens_BL[:, :-1],
        "predictors": predictors_A,
        "answers": tokens_BL[:, 1:].reshape(-1)[predictors_A],
    }
    there = upload(arrays, next(model.parameters()).device)
    hidden_BLH = model.base_model(input_ids=there["inputs"], use_cache=False).last_hidden_state
    logits_AV = _output_layer(model)(hidden_BLH.flatten(0, 1).index_select(0, there["predictors"]))
    return F.cross_entropy(logits_AV.float(), there["answers"], reduction="sum")


def _optimizers(model: PreTrainedModel, config: SFTConfig) -> list[Optimizer]:
    layers = (model.get_input_embeddings(), _output_layer(model))
    embeddings = {id(parameter) for layer in layers for parameter in layer.parameters()}
    by_muon: list[Tensor] = []
    by_adamw: list[Tensor] = []
    for parameter in model.parameters():
        (by_muon if parameter.ndim == 2 and id(parameter) not in embeddings else by_adamw).append(parameter)
    adamw = AdamW(by_adamw, lr=config.adamw_lr, betas=(0.9, 0.99), weight_decay=0.0)
    return [adamw, Muon(by_muon, lr=config.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")]


def _output_layer(model: Any) -> torch.nn.Module:
    layer: torch.nn.Module = model.get_output_embeddings()
    return layer
