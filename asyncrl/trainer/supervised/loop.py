"""Supervised training, on one's own conversations or to make the base model that RL starts from.

A run is a list of phases, each so many steps on one dataset's demonstrations. The demo has two: right demonstrations,
then a few careless ones, so that the model knows two ways and RL has something to select. What of a demonstration
carries loss is said in `asyncrl.datasets.demonstrations`.

What makes it fast on a CPU:

- Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) moves the weight matrices: its orthogonalised
  updates need about a third of AdamW's steps here. Embeddings and norms, which it is not made for, take AdamW.
- A batch is drawn at random, then cut into micro-batches of similar length whose gradients add up to the batch's own.
  So padding costs little, and the optimizer still sees random batches (batches of one length learn worse).
- Only the answer's positions go through the output layer and the loss.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW, Muon, Optimizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    get_cosine_with_min_lr_schedule_with_warmup,
)

from asyncrl.api import Tokenizer
from asyncrl.config.setting import Device
from asyncrl.datasets import DemonstrationDataset, Placed
from asyncrl.datasets.demonstrations import (
    Demonstration,
    DemonstrationFormat,
    EncodedRows,
    LazyRows,
    Rows,
    by_length,
    demonstration_batches,
    load_demonstrations,
    shown_with_loss,
)
from asyncrl.datasets.prompts import PromptFormat, load_chat_template
from asyncrl.datasets.survey import shown
from asyncrl.datasets.tokenizers import (
    CharTokenizer,
    ChatTokenizer,
    FastTokenizer,
    HuggingFaceTokenizer,
    load_tokenizer,
)
from asyncrl.trainer.supervised.settings import DEMO_MODEL, SFTConfig, SupervisedOptimizer
from asyncrl.weights import atomic_dir


@dataclass(frozen=True, slots=True)
class SFTPhase:
    """`steps` optimizer steps on the demonstrations of `dataset`."""

    dataset: DemonstrationDataset
    steps: int


@dataclass(frozen=True, slots=True)
class SFTProgress:
    """Reported after each step: 1-based step of `total`, loss in nats per answer token, seconds left; where it was
    measured after this step, the loss on held-out demonstrations.
    """

    step: int
    total: int
    loss: float
    eta_s: float
    held_out_loss: float | None = None


ProgressCallback = Callable[[SFTProgress], None]
NoteCallback = Callable[[str], None]


def phases_of(config: SFTConfig) -> list[SFTPhase]:
    """The phases that `config` describes, with their datasets."""
    data = config.dataset
    return [
        SFTPhase(load_demonstrations(data.path, {**data.args, **phase.args}, data.fields, "train", config.seed), steps)
        for phase, steps in ((phase, phase.steps) for phase in config.phases)
    ]


def held_out_of(config: SFTConfig) -> DemonstrationDataset | None:
    """The demonstrations that the held-out loss is measured on; None where it is not measured."""
    data, held_out = config.dataset, config.eval
    if not held_out.interval:
        return None
    fields = data.fields if held_out.fields is None else held_out.fields
    if held_out.path is None:
        return load_demonstrations(data.path, {**data.args, **held_out.args}, fields, "held_out", config.seed)
    return load_demonstrations(held_out.path, held_out.args, fields, "held_out", config.seed)


def demonstration_format(config: SFTConfig, tokenizer: ChatTokenizer) -> DemonstrationFormat:
    """How rows become demonstrations.

    Raises:
        ConfigError: the chat template cannot be read, or a setting of it is given where there is none.
    """
    named = config.model.path or config.model.tokenizer
    folder = Path(named).expanduser() if named else Path("a tokenizer of single letters")
    return DemonstrationFormat(
        PromptFormat(tokenizer, load_chat_template(folder, config.dataset)), config.dataset.train_on
    )


def make_base_model(
    config: SFTConfig,
    out_dir: Path,
    *,
    phases: Sequence[SFTPhase] | None = None,
    progress: ProgressCallback | None = None,
    note: NoteCallback | None = None,
) -> Path:
    """Train and save the model that `config` describes in the Hugging Face layout; it appears whole or not at all.

    The result is the same for the same config, its `threads` included.

    Args:
        out_dir: the folder to make; one that exists is replaced.
        phases: what to imitate, in order; by default `phases_of(config)`.
        progress: called after each step.
        note: called with what a person should know of the data.

    Raises:
        ValueError: there are no steps, a setting is out of range, or a row cannot be used.
    """
    phases = phases_of(config) if phases is None else phases
    initial = config.model.path
    folder = initial if initial is not None else config.model.tokenizer
    tokenizer = CharTokenizer() if folder is None else load_tokenizer(folder)
    with _threads(config.threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = (
            _random_model(config.model.architecture or DEMO_MODEL, tokenizer)
            if initial is None
            else cast(PreTrainedModel, AutoModelForCausalLM.from_pretrained(initial, dtype=torch.float32))
        )
        model.to(_device(config))  # type: ignore[arg-type]
        started = time.monotonic()
        measured: list[dict[str, Any]] = []

        def keep(report: SFTProgress) -> None:
            measured.append(asdict(report))
            if progress is not None:
                progress(report)

        loss = train_on_demonstrations(model, tokenizer, phases, config, progress=keep, note=note)
    record = {
        "seed": config.seed,
        "steps": [phase.steps for phase in phases],
        "settings": asdict(config),
        "final_loss": loss,
        "seconds": round(time.monotonic() - started, 2),
    }
    save_model(model.to("cpu"), tokenizer, out_dir, record, measured)  # type: ignore[arg-type]
    return out_dir


def train_on_demonstrations(
    model: PreTrainedModel,
    tokenizer: ChatTokenizer,
    phases: Sequence[SFTPhase],
    config: SFTConfig,
    *,
    progress: ProgressCallback | None = None,
    note: NoteCallback | None = None,
) -> float:
    """Train `model` in place; returns the last step's loss in nats per answer token.

    Raises:
        ValueError: there are no steps, a setting is out of range, or a row cannot be used.
    """
    total = sum(phase.steps for phase in phases)
    if total < 1:
        raise ValueError("supervised training has 0 steps: give at least one phase with steps >= 1")
    optimizers = _optimizers(model, config)
    schedulers = [
        get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, config.warmup_steps, total, min_lr_rate=config.min_lr_share
        )
        for optimizer in optimizers
    ]
    form, tell = demonstration_format(config, tokenizer), note or _nobody
    rows = [_encoded(phase.dataset, form, config.dataset.max_tokens, "dataset", tell) for phase in phases]
    held_out = held_out_of(config)
    held_out_rows = None
    if held_out is not None:
        held_out_rows = _encoded(held_out, form, config.dataset.max_tokens, "held out", tell)[: config.eval.size]
    if form.prompts.chat is not None:
        tell(f"first conversation, ⟦what carries loss⟧:\n{shown(shown_with_loss(rows[0][0][0], tokenizer))}")
    model.train()
    started, loss = time.monotonic(), 0.0
    batches = itertools.chain.from_iterable(
        demonstration_batches(encoded, batch_size=config.batch_size, steps=phase.steps, seed=config.seed + index)
        for index, (phase, encoded) in enumerate(zip(phases, rows, strict=True))
    )
    for step, batch in enumerate(batches, start=1):
        loss = _accumulate_gradients(model, batch, config.tokens_per_micro_batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        measured = None
        if held_out_rows is not None and (step % config.eval.interval == 0 or step == total):
            measured = held_out_loss(model, held_out_rows, config.tokens_per_micro_batch)
        if progress is not None:
            eta_s = (time.monotonic() - started) / step * (total - step)
            progress(SFTProgress(step, total, loss, eta_s, measured))
    model.train(False)
    return loss


def held_out_loss(model: PreTrainedModel, rows: Rows, max_tokens: int) -> float:
    """Mean loss of `rows` in nats per answer token; the model is left in training mode."""
    model.train(False)
    batch = [demonstration for row in rows for demonstration in row]
    with torch.no_grad():
        runs = by_length([len(item.token_ids) for item in batch], max_tokens)
        total = sum(_answer_loss(model, [batch[i] for i in run]).item() for run in runs)
    model.train()
    return total / sum(item.answer_length for item in batch)


def _encoded(
    dataset: DemonstrationDataset, form: DemonstrationFormat, max_tokens: int, name: str, tell: NoteCallback
) -> Rows:
    """The rows of a file, encoded now; those of a class when they are asked for."""
    if not isinstance(dataset, Placed):
        return LazyRows(dataset, form)
    encoded = EncodedRows.of(dataset, form, max_tokens)
    for line in encoded.notes:
        tell(f"{name}: {line}")
    return encoded.rows


def _nobody(text: str) -> None:
    """Takes a note."""


def _device(config: SFTConfig) -> torch.device:
    if config.device == Device.auto:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(str(config.device))


def save_model(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    out_dir: Path,
    record: Mapping[str, Any],
    measured: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write weights, config, tokenizer, `training.json` and, a line for each of `measured`, `metrics.jsonl` aside and
    synced, then rename the folder to `out_dir`.

    Raises:
        TypeError: the tokenizer is none that `load_tokenizer` returns, which can be saved.
    """
    aside = atomic_dir.begin(out_dir)
    model.save_pretrained(aside)
    if not isinstance(tokenizer, CharTokenizer | FastTokenizer | HuggingFaceTokenizer):
        raise TypeError(
            f"cannot save a {type(tokenizer).__name__}: give what load_tokenizer returns, or a CharTokenizer"
        )
    tokenizer.save(aside)
    (aside / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if measured:
        lines = "".join(json.dumps(row) + "\n" for row in measured)
        (aside / "metrics.jsonl").write_text(lines, encoding="utf-8")
    for file in aside.iterdir():
        atomic_dir.sync_file(file)
    atomic_dir.commit(out_dir)


def _accumulate_gradients(model: PreTrainedModel, batch: Sequence[Demonstration], max_tokens: int) -> float:
    """Backward of the batch's mean loss per answer token; returns that mean."""
    answer_tokens = sum(item.answer_length for item in batch)
    total = 0.0
    for indices in by_length([len(item.token_ids) for item in batch], max_tokens):
        loss = _answer_loss(model, [batch[i] for i in indices]) / answer_tokens
        torch.autograd.backward(loss)
        total += loss.item()
    return total


def _answer_loss(model: PreTrainedModel, demonstrations: Sequence[Demonstration]) -> Tensor:
    """Summed cross entropy of the answers' tokens. Padding is on the right, where causal attention ignores it."""
    longest = max(len(item.token_ids) for item in demonstrations)
    tokens_BL = torch.zeros(len(demonstrations), longest, dtype=torch.long)
    answer_BL = torch.zeros(len(demonstrations), longest, dtype=torch.bool)
    for row, item in enumerate(demonstrations):
        tokens_BL[row, : len(item.token_ids)] = torch.tensor(item.token_ids)
        answer_BL[row, : len(item.token_ids)] = torch.tensor(item.loss_mask)
    device = next(model.parameters()).device
    tokens_BL, answer_BL = tokens_BL.to(device), answer_BL.to(device)
    hidden_BLH = model.base_model(input_ids=tokens_BL[:, :-1], use_cache=False).last_hidden_state
    predicts_BL = answer_BL[:, 1:]
    logits_AV = _output_layer(model)(hidden_BLH[predicts_BL])
    return F.cross_entropy(logits_AV.float(), tokens_BL[:, 1:][predicts_BL], reduction="sum")


def _optimizers(model: PreTrainedModel, config: SFTConfig) -> list[Optimizer]:
    layers = (model.get_input_embeddings(), _output_layer(model))
    embeddings = {id(parameter) for layer in layers for parameter in layer.parameters()}
    by_muon: list[Tensor] = []
    by_adamw: list[Tensor] = []
    for parameter in model.parameters():
        matrix = parameter.ndim == 2 and id(parameter) not in embeddings
        (by_muon if matrix and config.optimizer == SupervisedOptimizer.muon else by_adamw).append(parameter)
    optimizers: list[Optimizer] = [AdamW(by_adamw, lr=config.adamw_lr, betas=(0.9, 0.99), weight_decay=0.0)]
    if by_muon:
        optimizers.append(Muon(by_muon, lr=config.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def _output_layer(model: Any) -> torch.nn.Module:
    layer: torch.nn.Module = model.get_output_embeddings()
    return layer


def _random_model(architecture: Mapping[str, Any], tokenizer: Tokenizer) -> PreTrainedModel:
    settings = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, **architecture}
    if isinstance(tokenizer, CharTokenizer):
        settings = {"vocab_size": tokenizer.vocab_size, "pad_token_id": tokenizer.pad_token_id, **settings}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model: PreTrainedModel = cast(Any, AutoModelForCausalLM).from_config(config)
    return model


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
