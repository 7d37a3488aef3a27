"""Supervised training on conversations or on judged answers, or to make the base model for RL.

A run is a list of phases: a number of steps on the demonstrations of one dataset. The demo has two phases, correct
demonstrations and then a few careless ones, so that the model has both behaviours and RL can select between them.
`asyncrl.plugins.datasets.supervised.demonstrations` decides which tokens of a demonstration carry loss.

There is one loop. A learner takes a step on a batch (`engine_learner`), and `loss` decides what is learnt
(`objectives`). `make_model` gives the loop its learner, and makes the folder of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.models.pictures.picture_rules import picture_rules
from asyncrl.plugins.datasets import DemonstrationDataset, Placed
from asyncrl.plugins.datasets.prompt_format import PromptFormat, load_chat_template
from asyncrl.plugins.datasets.prompt_stats import shown
from asyncrl.plugins.datasets.supervised.demonstration_rows import (
    EncodedRows,
    LazyRows,
    RowFormat,
    Rows,
    demonstration_batches,
    load_demonstrations,
    shown_with_loss,
)
from asyncrl.plugins.datasets.supervised.demonstrations import Demonstration, DemonstrationFormat
from asyncrl.plugins.datasets.supervised.preferences import PreferenceFormat
from asyncrl.plugins.datasets.tokenizers import ChatTokenizer
from asyncrl.trainer.settings import VisionMode
from asyncrl.trainer.supervised.engine_learner import EngineLearner
from asyncrl.trainer.supervised.losses import LABEL_LOSS, loss_kind
from asyncrl.trainer.supervised.settings import SFTConfig


@dataclass(frozen=True, slots=True)
class SFTPhase:
    """`steps` optimizer steps on the demonstrations of `dataset`."""

    dataset: DemonstrationDataset
    steps: int


@dataclass(frozen=True, slots=True)
class SFTProgress:
    """Report of one step.

    Attributes:
        step, total: the step, from 1, and the number of steps.
        loss, accuracy, margin: figures of the step's batch (`Measures`); None if the loss does not have them.
        held_out_loss, held_out_accuracy: figures of the held-out rows; None if they were not measured after this step.
        eta_s: estimated seconds until the end.
    """

    step: int
    total: int
    loss: float
    eta_s: float
    held_out_loss: float | None = None
    accuracy: float | None = None
    margin: float | None = None
    held_out_accuracy: float | None = None
    held_out_margin: float | None = None

    def row(self) -> dict[str, Any]:
        """Return the line of `metrics.jsonl`, without the figures that the loss does not have."""
        return {name: value for name, value in asdict(self).items() if value is not None or name == "held_out_loss"}


ProgressCallback = Callable[[SFTProgress], None]
NoteCallback = Callable[[str], None]


def phases_of(config: SFTConfig) -> list[SFTPhase]:
    """Return the phases of `config`, with their datasets."""
    data, load = config.dataset, partial(load_demonstrations, judged=loss_kind(config.loss) is not None)
    return [
        SFTPhase(load(data.path, {**data.args, **phase.args}, data.fields, "train", config.seed), phase.steps)
        for phase in config.phases
    ]


def held_out_of(config: SFTConfig) -> DemonstrationDataset | None:
    """Return the demonstrations on which the held-out loss is measured; None if it is not measured."""
    data, held_out = config.dataset, config.eval
    if not held_out.interval:
        return None
    fields = data.fields if held_out.fields is None else held_out.fields
    load = partial(load_demonstrations, judged=loss_kind(config.loss) is not None)
    if held_out.path is None:
        return load(data.path, {**data.args, **held_out.args}, fields, "held_out", config.seed)
    return load(held_out.path, held_out.args, fields, "held_out", config.seed)


def row_format(config: SFTConfig, tokenizer: ChatTokenizer) -> RowFormat:
    """Return the format that converts rows into the input of `loss`: demonstrations, or judged answers.

    Raises:
        ConfigError: the chat template cannot be read, or one of its settings is given without a template.
    """
    named = config.model.path or config.model.tokenizer
    folder = Path(named).expanduser() if named else Path("a tokenizer of single letters")
    rules = None if config.model.path is None or config.model.vision == VisionMode.none else picture_rules(folder)
    prompts = PromptFormat(tokenizer, load_chat_template(folder, config.dataset), pictures=rules)
    kind = loss_kind(config.loss)
    if kind is None:
        return DemonstrationFormat(prompts, config.dataset.train_on)
    return PreferenceFormat(prompts, labelled=kind == LABEL_LOSS)


def train_on_demonstrations(
    learner: EngineLearner,
    tokenizer: ChatTokenizer,
    phases: Sequence[SFTPhase],
    config: SFTConfig,
    *,
    progress: ProgressCallback | None = None,
    note: NoteCallback | None = None,
    last_loss: float = 0.0,
) -> float:
    """Take the steps that `learner` has not taken yet. Return the loss of the last one.

    Args:
        last_loss: loss to return if no step is left.

    Raises:
        ValueError: a setting is out of range, or a row cannot be used.
    """
    total = sum(phase.steps for phase in phases)
    form, tell = row_format(config, tokenizer), note or _nobody
    rows = [_encoded(phase.dataset, form, config.dataset.max_tokens, "dataset", tell) for phase in phases]
    held_out = held_out_of(config)
    held_out_batch: list[Demonstration] = []
    if held_out is not None:
        kept = _encoded(held_out, form, config.dataset.max_tokens, "held out", tell)[: config.eval.size]
        held_out_batch = [demonstration for row in kept for demonstration in row]
    if form.prompts.chat is not None:
        tell(f"first conversation, ⟦what carries loss⟧:\n{shown(shown_with_loss(rows[0][0][0], tokenizer))}")
    if begin := learner.steps_done:
        tell(f"continuing after step {begin} of {total}")
    started, loss = time.monotonic(), last_loss
    for step, batch in enumerate(_batches(phases, rows, config, begin), start=begin + 1):
        loss, accuracy, margin = learner.learn(batch)
        measured: tuple[float | None, float | None, float | None] = (None, None, None)
        if held_out_batch and (step % config.eval.interval == 0 or step == total):
            measured = learner.measure(held_out_batch)
        if progress is not None:
            eta_s = (time.monotonic() - started) / (step - begin) * (total - step)
            progress(SFTProgress(step, total, loss, eta_s, measured[0], accuracy, margin, *measured[1:]))
        learner.complete(step)
    return loss


def _batches(
    phases: Sequence[SFTPhase], rows: Sequence[Rows], config: SFTConfig, begin: int
) -> Iterator[list[Demonstration]]:
    """Yield the batches of all phases, without the first `begin`."""
    for index, (phase, encoded) in enumerate(zip(phases, rows, strict=True)):
        done = min(begin, phase.steps)
        begin -= done
        yield from demonstration_batches(
            encoded, batch_size=config.batch_size, steps=phase.steps, seed=config.seed + index, begin=done
        )


def _encoded(dataset: DemonstrationDataset, form: RowFormat, max_tokens: int, name: str, tell: NoteCallback) -> Rows:
    """Encode the rows of a file now, and those of a dataset class on demand."""
    if not isinstance(dataset, Placed):
        return LazyRows(dataset, form)
    encoded = EncodedRows.of(dataset, form, max_tokens)
    for line in encoded.notes:
        tell(f"{name}: {line}")
    return encoded.rows


def _nobody(told: object) -> None:
    """Ignore a note: the default callback."""
