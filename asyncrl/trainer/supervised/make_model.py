"""Make the folder of a model by supervised training: ranks, first weights, the loop, the files beside the weights.

The first rank starts the others, and all join as in RL training.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrl.api import Tokenizer
from asyncrl.comm.files import make_private_folder
from asyncrl.comm.name_resolve import NameBackend, make_resolver
from asyncrl.comm.names import ACTOR
from asyncrl.config.run_dir import LOCK_FILE, METRICS_FILE, NAMES_DIR, write_run_config
from asyncrl.config.setting import Device
from asyncrl.data.tokenizers import (
    CharTokenizer,
    FastTokenizer,
    HuggingFaceTokenizer,
    load_tokenizer,
    model_files,
)
from asyncrl.models.model_config import CONFIG_FILE as MODEL_CONFIG
from asyncrl.models.model_config import TOKENIZER_CONFIG_FILE, for_all_versions
from asyncrl.models.torch_device import choose_device
from asyncrl.observe.tail import read_rows
from asyncrl.runtime.process.hardware import visible_gpus
from asyncrl.trainer.parallel.placement import Placement, worker_grid
from asyncrl.trainer.parallel.process_groups import training_world
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.supervised.objectives import engine_settings
from asyncrl.trainer.supervised.settings import CHILD, DEMO_MODEL, SFTConfig, run_dir_of
from asyncrl.trainer.supervised.supervised_loop import (
    EngineLearner,
    NoteCallback,
    ProgressCallback,
    SFTPhase,
    SFTProgress,
    phases_of,
    train_on_demonstrations,
)
from asyncrl.weights import atomic_dir

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
