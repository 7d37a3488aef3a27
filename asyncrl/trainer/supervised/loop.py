"""Supervised training: on one's own conversations, on judged answers, or to make the base model that RL starts from.

A run is a list of phases: a number of steps on the demonstrations of one dataset. The demo has two phases, correct
demonstrations and then a few careless ones, so that the model knows both ways and RL has something to select.
`asyncrl.plugins.datasets.supervised.demonstrations` decides which tokens of a demonstration carry loss.

There is one loop. A `Learner` takes a step on a batch: with AdamW by the engines of RL training (`engine_learner`),
where `loss` decides what is learnt (`objectives`), or with Muon (`muon`). Muon is not a part of the engines: it
orthogonalises whole matrices, which no rank of a sharded engine has, and only the small models of the demos are trained
from scratch.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, cast

import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrl.api import Tokenizer
from asyncrl.comm.files.private_files import make_private_folder
from asyncrl.config.run_dir import CONFIG_FILE, METRICS_FILE
from asyncrl.models.pictures.picture_rules import picture_rules
from asyncrl.observe.metrics.sinks import read_rows
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
from asyncrl.plugins.datasets.tokenizers import (
    CharTokenizer,
    ChatTokenizer,
    FastTokenizer,
    HuggingFaceTokenizer,
    load_tokenizer,
    model_files,
)
from asyncrl.runtime.process.torch_device import choose_device
from asyncrl.trainer.settings import VisionMode
from asyncrl.trainer.supervised.engine_learner import EngineLearner
from asyncrl.trainer.supervised.losses import LABEL_LOSS, loss_kind
from asyncrl.trainer.supervised.muon import MuonLearner
from asyncrl.trainer.supervised.objectives import Measures
from asyncrl.trainer.supervised.settings import DEMO_MODEL, SFTConfig, SupervisedOptimizer
from asyncrl.trainer.supervised.start_ranks import joined
from asyncrl.weights import atomic_dir


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
        held_out_loss, held_out_accuracy: the same of the held-out rows; None if they were not measured after this step.
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
        """The line of `metrics.jsonl`: without the figures that the loss does not have."""
        return {name: value for name, value in asdict(self).items() if value is not None or name == "held_out_loss"}


class Learner(Protocol):
    """A model that learns from sequences."""

    @property
    def steps_done(self) -> int:
        """Steps that were taken before this process began."""
        ...

    def learn(self, batch: Sequence[Demonstration]) -> Measures:
        """Take a step on `batch`. Return the figures of `batch` before the step."""
        ...

    def measure(self, batch: Sequence[Demonstration]) -> Measures:
        """Return the figures of `batch`, without a step."""
        ...

    def complete(self, step: int) -> None:
        """Record that `step` (from 1) is complete and reported."""
        ...


ProgressCallback = Callable[[SFTProgress], None]
NoteCallback = Callable[[str], None]


def phases_of(config: SFTConfig) -> list[SFTPhase]:
    """The phases that `config` describes, with their datasets."""
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
    """Return the format that turns rows into what `loss` takes: demonstrations, or judged answers.

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


def make_base_model(
    config: SFTConfig,
    out_dir: Path,
    *,
    phases: Sequence[SFTPhase] | None = None,
    progress: ProgressCallback | None = None,
    note: NoteCallback | None = None,
    rank: int = 0,
) -> Path:
    """Train and save the model that `config` describes in the Hugging Face layout; it appears whole or not at all.

    The same config, with the same `threads`, gives the same model. With `optimizer=adamw` the run has its own folder,
    `<out_dir>.run`. If that folder exists, the run resumes from it. It is kept afterwards if checkpoints are on.

    Args:
        out_dir: the folder to make; one that exists is replaced.
        phases: what to imitate, in order; by default `phases_of(config)`.
        progress: called after each step.
        note: called with each note on the data that the user should read.
        rank: this process's rank among those of `trainer.parallel`; the first rank reports progress.

    Raises:
        ValueError: there are no steps, a setting is out of range, or a row cannot be used.
    """
    phases = phases_of(config) if phases is None else phases
    steps = [phase.steps for phase in phases]
    if sum(steps) < 1:
        raise ValueError("supervised training has 0 steps: give at least one phase with steps >= 1")
    folder = config.model.path if config.model.path is not None else config.model.tokenizer
    tokenizer = CharTokenizer() if folder is None else load_tokenizer(folder)
    by, started = _by_muon if config.optimizer == SupervisedOptimizer.muon else _by_engine, time.monotonic()
    with _threads(config.threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        with by(config, out_dir, tokenizer, sum(steps), rank) as (learner, save, file):
            before = [] if file is None else [row for row in read_rows(file) if row["step"] <= learner.steps_done]
            with _Rows(file, before) as rows:
                loss = train_on_demonstrations(
                    learner,
                    tokenizer,
                    phases,
                    config,
                    progress=_both(rows.write, progress or _nobody),
                    note=note,
                    last_loss=before[-1]["loss"] if before else 0.0,
                )
            save(_records(config, steps, loss, started, rows.all))
    return out_dir


class _Run(NamedTuple):
    """A model in training."""

    learner: Learner
    save: Callable[[dict[str, bytes]], None]
    """Makes the folder of the model that was trained, with these files beside it, by name."""
    rows: Path | None
    """File that keeps the metrics of the steps while the training runs; None if they are not kept, or another rank
    keeps them.
    """


@contextmanager
def _by_muon(config: SFTConfig, out_dir: Path, tokenizer: ChatTokenizer, total: int, rank: int) -> Iterator[_Run]:
    initial = config.model.path
    model = (
        _random_model(config.model.architecture or DEMO_MODEL, tokenizer)
        if initial is None
        else cast(PreTrainedModel, AutoModelForCausalLM.from_pretrained(initial, dtype=torch.float32))
    )
    model.to(choose_device("device", config.device))  # type: ignore[arg-type]

    def save(beside: dict[str, bytes]) -> None:
        model.train(False)
        save_model(model.to("cpu"), tokenizer, out_dir, beside)  # type: ignore[arg-type]

    yield _Run(MuonLearner(model, config, total), save, None)


@contextmanager
def _by_engine(config: SFTConfig, out_dir: Path, tokenizer: ChatTokenizer, total: int, rank: int) -> Iterator[_Run]:
    run_dir = run_dir_of(out_dir)
    initial = run_dir / "initial" if config.model.path is None else Path(config.model.path).expanduser().resolve()
    if rank == 0:
        make_private_folder(run_dir)
        OmegaConf.save(OmegaConf.structured(config), run_dir / CONFIG_FILE)
        if config.model.path is None and not initial.is_dir():
            model = _random_model(config.model.architecture or DEMO_MODEL, tokenizer)
            save_model(model, tokenizer, initial, {})
    with joined(config, run_dir, rank, total) as world:
        learner = EngineLearner(initial, run_dir, config, total, world, choose_device("device", config.device))
        save = partial(learner.finish, total, out_dir)
        yield _Run(learner, save, run_dir / METRICS_FILE if rank == 0 else None)
    if rank == 0 and not config.checkpoint.interval:
        shutil.rmtree(run_dir)


class _Rows:
    """The lines of `metrics.jsonl`: those from `before`, and new ones, each written to the file at once if there is
    one.
    """

    def __init__(self, file: Path | None, before: Sequence[Mapping[str, Any]]) -> None:
        self.all = list(before)
        self._file = None if file is None else file.open("w", encoding="utf-8")
        for row in before:
            self._append(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, report: SFTProgress) -> None:
        """Add the row of `report`."""
        self.all.append(report.row())
        self._append(self.all[-1])

    def _append(self, row: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


def _both(first: ProgressCallback, second: ProgressCallback) -> ProgressCallback:
    def tell(report: SFTProgress) -> None:
        first(report)
        second(report)

    return tell


def _records(
    config: SFTConfig, steps: Sequence[int], loss: float, started: float, measured: Sequence[Mapping[str, Any]]
) -> dict[str, bytes]:
    """Return the files beside the model: the record of its training, and a line for each step."""
    record = {
        "seed": config.seed,
        "steps": steps,
        "settings": asdict(config),
        "final_loss": loss,
        "seconds": round(time.monotonic() - started, 2),
    }
    lines = "".join(json.dumps(row) + "\n" for row in measured)
    return {"training.json": f"{json.dumps(record, indent=2)}\n".encode(), METRICS_FILE: lines.encode()}


def train_on_demonstrations(
    learner: Learner,
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
        tell(f"going on after step {begin} of {total}")
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
    """Ignore a report: the default callback."""


def run_dir_of(out_dir: Path) -> Path:
    """The folder of the run that makes `out_dir`."""
    return out_dir.with_name(f"{out_dir.name}.run")


def save_model(model: PreTrainedModel, tokenizer: Tokenizer, out_dir: Path, beside: Mapping[str, bytes]) -> None:
    """Write weights, config, tokenizer and the files `beside` by name aside and synced, then rename the folder to
    `out_dir`.

    Raises:
        TypeError: a tokenizer of this class cannot be saved; those that `load_tokenizer` returns can.
    """
    aside = atomic_dir.begin(out_dir)
    model.save_pretrained(aside)
    if not isinstance(tokenizer, CharTokenizer | FastTokenizer | HuggingFaceTokenizer):
        raise TypeError(
            f"cannot save a {type(tokenizer).__name__}: give what load_tokenizer returns, or a CharTokenizer"
        )
    tokenizer.save(aside)
    for name, content in beside.items():
        (aside / name).parent.mkdir(exist_ok=True)
        (aside / name).write_bytes(content)
    for file in model_files(aside).values():
        atomic_dir.sync_file(file)
    atomic_dir.commit(out_dir)


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
