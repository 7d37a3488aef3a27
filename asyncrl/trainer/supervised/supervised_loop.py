"""Supervised training on conversations or on judged answers, or to make the base model for RL.

A run is a list of phases: a number of steps on the demonstrations of one dataset. The demo has two phases, correct
demonstrations and then a few careless ones, so that the model has both behaviours and RL can select between them.
`asyncrl.data.demonstrations` decides which tokens of a demonstration carry loss.

There is one loop. `EngineLearner` takes a step on a batch by the engines of RL training: packed if that is proven
correct, with adapters and layouts. `loss` decides what is learnt (`objectives`). `make_base_model` gives the loop its
learner, and makes the folder of the model. The first rank starts the others (`other_ranks`), and all join as in RL
training.

A run's folder holds its checkpoints and, in `weights/`, the models at its start and at its end, so `asyncrl export`
works as on an RL run. An interrupted run resumes from its newest checkpoint with the same result as without the
interruption: the data order depends only on the step, and a checkpoint has the optimizer's whole state.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrl.api import Tokenizer
from asyncrl.comm.files import make_private_folder
from asyncrl.comm.name_resolve import NameBackend, make_resolver
from asyncrl.comm.names import ACTOR
from asyncrl.comm.typed import decode_json
from asyncrl.config.run_dir import CHECKPOINTS_DIR, LOCK_FILE, METRICS_FILE, NAMES_DIR, WEIGHTS_DIR, write_run_config
from asyncrl.config.setting import Device
from asyncrl.data.datasets import DemonstrationDataset, Located
from asyncrl.data.demonstrations import (
    Demonstration,
    DemonstrationFormat,
    EncodedRows,
    LazyRows,
    PreferenceFormat,
    RowFormat,
    Rows,
    demonstration_batches,
    load_demonstrations,
    shown_with_loss,
)
from asyncrl.data.prompt_format import PromptFormat, load_chat_template, shown
from asyncrl.data.tokenizers import (
    CharTokenizer,
    ChatTokenizer,
    FastTokenizer,
    HuggingFaceTokenizer,
    load_tokenizer,
    model_files,
)
from asyncrl.models.model_config import CONFIG_FILE as MODEL_CONFIG
from asyncrl.models.model_config import TOKENIZER_CONFIG_FILE, for_all_versions
from asyncrl.models.picture_rules import picture_rules
from asyncrl.models.torch_device import choose_device
from asyncrl.observe.tail import read_rows
from asyncrl.runtime.process.hardware import visible_gpus
from asyncrl.trainer.model.lora import adapter_config
from asyncrl.trainer.model.lora_checks import publishes_adapters
from asyncrl.trainer.parallel.placement import Placement, worker_grid
from asyncrl.trainer.parallel.process_groups import training_world
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.settings import OptimizerName, VisionMode
from asyncrl.trainer.supervised.checks import LABEL_LOSS, loss_kind
from asyncrl.trainer.supervised.objectives import Measures, engine_settings, make_objective
from asyncrl.trainer.supervised.settings import CHILD, DEMO_MODEL, SFTConfig, run_dir_of
from asyncrl.weights import atomic_dir
from asyncrl.weights.checkpoints import CheckpointWriter, restore_newest
from asyncrl.weights.manifest import ADAPTERS_FILE, FileEntry, verify
from asyncrl.weights.publishing import SharedFiles, publish, tokenizer_assets, write_model
from asyncrl.weights.stored import MergedModel, StoredModel, from_folder


class EngineLearner:
    """Trains a model by the engines of RL training. All ranks call its methods together.

    Args:
        model: Hugging Face folder to begin with.
        run_dir: the run's folder.
        total: number of steps.

    Attributes:
        steps_done: steps of the checkpoint that this run resumed from; 0 without one.

    Raises:
        ValueError: the model cannot be trained correctly, or the newest checkpoint is of another model.
    """

    def __init__(
        self, model: Path, run_dir: Path, config: SFTConfig, total: int, world: World, device: torch.device
    ) -> None:
        self._model, self._run_dir, self._checkpoint, self._world = model, run_dir, config.checkpoint, world
        settings = self._settings = engine_settings(config, model, total)
        self._objective = make_objective(config, settings, world.position(ACTOR), device)
        self._engine = self._objective.engine
        engines = {ACTOR: self._engine}
        state = restore_newest(engines, run_dir / CHECKPOINTS_DIR, world.everyone)
        self.steps_done = 0 if state is None else int(state["version"])
        self._steps = self.steps_done
        self._writer = CheckpointWriter(engines, (ACTOR,), world.everyone)
        self._lora = config.model.lora if publishes_adapters(settings) else None  # a version holds only adapters
        if config.checkpoint.interval and not self.steps_done:
            self._publish(0)

    def learn(self, batch: Sequence[Demonstration]) -> Measures:
        """Take a step on `batch`, which is the same on all ranks. Return the figures of `batch` before the step.

        Raises:
            FloatingPointError: the gradient is not finite.
        """
        measures = self._objective.compute_gradients(batch)
        outcome = self._engine.step(self._settings.learning_rate(self._steps))
        self._steps += 1
        if not outcome.applied:
            rates = "lr and adamw_lr" if self._settings.optimizer.name == OptimizerName.muon else "adamw_lr"
            raise FloatingPointError(f"the gradient's norm is {outcome.grad_norm}; lower {rates}")
        return measures

    def measure(self, batch: Sequence[Demonstration]) -> Measures:
        """Return the figures of `batch`, without a step."""
        return self._objective.measure(batch)

    def complete(self, step: int) -> None:
        """Write a checkpoint if one is due after `step` (from 1), which is complete and reported."""
        if not self._checkpoint.interval or step % self._checkpoint.interval:
            return
        path = self._run_dir / CHECKPOINTS_DIR / f"v{step}"
        self._writer.begin(path, version=step, state={})
        mine = msgspec.json.encode(self._writer.share(path).result())
        files: dict[str, FileEntry] = {}
        for written in self._world.everyone.all_gather_bytes(mine):
            files |= decode_json(written, dict[str, FileEntry])

        def commit() -> None:
            if self._world.everyone.leads:
                self._writer.commit(path, files, keep=self._checkpoint.keep, protected=())

        self._world.everyone.together(commit, f"completing {path}")

    def finish(self, step: int, out_dir: Path, beside: dict[str, bytes]) -> None:
        """Publish the model after `step` steps, and write it, adapters merged, as the Hugging Face folder `out_dir`,
        with the files `beside` by name.
        """
        self._writer.close()
        published, ranks = self._publish(step), self._world.everyone

        def write() -> None:
            if not ranks.leads:
                return
            stored = StoredModel(verify(published), from_folder(published))
            if self._lora is None:
                model: StoredModel | MergedModel = stored
                files = {"config.json": published / "config.json", **tokenizer_assets(published)}
                own = {name: file.read_bytes() for name, file in files.items()}
            else:
                model = merged = MergedModel(stored, (published / ADAPTERS_FILE).read_bytes())
                own = merged.beside()
            if out_dir.exists():
                atomic_dir.remove(out_dir)
            write_model(model, out_dir, {**own, **beside}, ranks)

        ranks.together(write, f"writing {out_dir}")

    def _publish(self, version: int) -> Path:
        """Write the model, or its adapters, as `version`; return the folder."""
        shared = SharedFiles(self._engine.model_config, tokenizer_assets(self._model))
        if self._lora is not None:
            specs, model_config = self._engine.published_specs(), self._engine.model_config
            shared = SharedFiles(adapter_config(self._lora, str(self._model), specs, model_config))
        root, ranks = self._run_dir / WEIGHTS_DIR, self._world.everyone
        return publish(self._engine, root, role=ACTOR, version=version, ranks=ranks, shared=shared)


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
    form, tell = row_format(config, tokenizer), note or (lambda text: None)
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
    if not isinstance(dataset, Located):
        return LazyRows(dataset, form)
    encoded = EncodedRows.of(dataset, form, max_tokens)
    for line in encoded.notes:
        tell(f"{name}: {line}")
    return encoded.rows


END_S = 10.0
"""Time limit in seconds for the other ranks to end after the first one is done."""


@contextmanager
def joined(config: SFTConfig, run_dir: Path, rank: int, total: int, device: torch.device) -> Iterator[World]:
    """Join the world of all ranks of `trainer.parallel`, with this process as `rank`, which computes on `device`."""
    settings = engine_settings(config, run_dir, total)
    placement = Placement({ACTOR: worker_grid(settings)})
    with ExitStack() as stack:
        resolver = make_resolver(NameBackend.file, str(run_dir / NAMES_DIR))
        stack.callback(resolver.close)
        yield stack.enter_context(training_world(settings, rank, placement, device, run_dir, resolver))


@contextmanager
def other_ranks(config: SFTConfig, arguments: Sequence[str], run_dir: Path) -> Iterator[None]:
    """Start the other ranks as processes with these `arguments` and their rank; end them with this process.

    On GPUs each rank sees one: this process the first, as torch chooses by itself, and each other rank the next.

    Within this block no other process trains in `run_dir`. An earlier process whose launcher was killed ends at its
    next step, because its progress has no reader; this function waits for that.
    """
    make_private_folder(run_dir)
    count = worker_grid(engine_settings(config, run_dir, 1)).workers
    command = [sys.executable, "-m", CHILD, *arguments]
    gpus = () if config.device == Device.cpu else visible_gpus()
    seen = [{"CUDA_VISIBLE_DEVICES": gpus[rank]} if gpus else {} for rank in range(count)]
    with (run_dir / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(run_dir / NAMES_DIR, ignore_errors=True)  # else a rank may use the meeting file of an earlier run
        others = [subprocess.Popen([*command, str(rank)], env=os.environ | seen[rank]) for rank in range(1, count)]
        try:
            yield
            with suppress(subprocess.TimeoutExpired):  # the model is complete, even if a rank does not end
                for other in others:
                    other.wait(END_S)
        finally:
            for other in others:
                other.kill()
                other.wait()


def make_base_model(
    config: SFTConfig,
    out_dir: Path,
    *,
    phases: Sequence[SFTPhase] | None = None,
    progress: ProgressCallback | None = None,
    note: NoteCallback | None = None,
    rank: int = 0,
) -> Path:
    """Train and save the model that `config` describes in the Hugging Face layout; the folder appears only once it is
    complete.

    The same config, with the same `threads`, gives the same model. The run has its own folder, `<out_dir>.run`. If that
    folder exists, the run resumes from it. It is kept afterwards if checkpoints are on.

    Args:
        out_dir: folder of the model; an existing one is replaced.
        phases: phases of training, in order; by default `phases_of(config)`.
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
    run_dir, device, started = run_dir_of(out_dir), choose_device("device", config.device), time.monotonic()
    with _threads(config.threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        initial = run_dir / "initial" if config.model.path is None else Path(config.model.path).expanduser().resolve()
        if rank == 0:
            make_private_folder(run_dir)
            write_run_config(config, run_dir)
            if config.model.path is None and not initial.is_dir():
                model = _random_model(config.model.architecture or DEMO_MODEL, tokenizer)
                save_model(model, tokenizer, initial, {})
        with joined(config, run_dir, rank, sum(steps), device) as world:
            learner = EngineLearner(initial, run_dir, config, sum(steps), world, device)
            file = run_dir / METRICS_FILE if rank == 0 else None
            before = [] if file is None else [row for row in read_rows(file) if row["step"] <= learner.steps_done]
            with _Rows(file, before, progress) as rows:
                loss = train_on_demonstrations(
                    learner,
                    tokenizer,
                    phases,
                    config,
                    progress=rows.write,
                    note=note,
                    last_loss=before[-1]["loss"] if before else 0.0,
                )
            learner.finish(sum(steps), out_dir, _records(config, steps, loss, started, rows.all))
    if rank == 0 and not config.checkpoint.interval:
        shutil.rmtree(run_dir)
    return out_dir


class _Rows:
    """The lines of `metrics.jsonl`: those from `before`, and new ones, each written to the file at once if there is
    one, and then reported to `progress`.
    """

    def __init__(
        self, file: Path | None, before: Sequence[Mapping[str, Any]], progress: ProgressCallback | None
    ) -> None:
        self.all, self._progress = list(before), progress
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
        if self._progress is not None:
            self._progress(report)

    def _append(self, row: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()


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
    for name, file in model_files(aside).items():
        if name in (MODEL_CONFIG, TOKENIZER_CONFIG_FILE):
            file.write_bytes(for_all_versions(name, file.read_bytes()))
        atomic_dir.sync(file)
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
