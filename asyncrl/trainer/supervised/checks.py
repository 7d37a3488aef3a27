"""Checks of a supervised experiment's settings and rows, and its losses by name. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.plugin_code import catalog
from asyncrl.config.plugin_code.import_paths import PluginError
from asyncrl.config.setting import ChoiceConfig, ConfigError, Device, did_you_mean
from asyncrl.data.checks import source_problems
from asyncrl.data.datasets import Located
from asyncrl.data.demonstrations import conversation_of, judged_answers, load_demonstrations, wrong_conversation
from asyncrl.data.files import FileDataset
from asyncrl.data.settings import TrainOn, is_data_path
from asyncrl.models.folder_checks import hugging_face_folder
from asyncrl.runtime.process.hardware import count_gpus
from asyncrl.trainer.model.lora_checks import lora_problems
from asyncrl.trainer.parallel.placement import WorkerGrid, layout_of
from asyncrl.trainer.settings import LoraPublish, OptimizerName
from asyncrl.trainer.supervised.settings import CROSS_ENTROPY, MUON_LR, SFTConfig

REWARD_LOSS, PAIR_LOSS, LABEL_LOSS = "reward_loss", "pair_loss", "label_loss"
KINDS = (REWARD_LOSS, PAIR_LOSS, LABEL_LOSS)


def loss_kind(loss: ChoiceConfig) -> str | None:
    """Return the kind of a loss on judged answers, one of `KINDS`; None for the loss on demonstrations.

    Raises:
        PluginError: there is no such loss.
    """
    if loss.name == CROSS_ENTROPY:
        return None
    kinds = {name: kind for kind in KINDS for name in catalog.known(kind)}
    if loss.name not in kinds:
        raise PluginError(
            f"unknown loss {loss.name!r}{did_you_mean(loss.name, (CROSS_ENTROPY, *kinds))}; known: "
            f"{', '.join((CROSS_ENTROPY, *kinds))}"
        )
    return kinds[loss.name]


def check(config: SFTConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    data = config.dataset
    yield from source_problems("dataset", data.path)
    if is_data_path(data.path):
        yield from (
            f"dataset.args.{name}: it is set by asyncrl for supervised training; leave it out"
            for name in ("demonstrations", "pairs", "fields")
            if name in data.args
        )
    yield from _loss(config)
    yield from _held_out(config)
    yield from _engine(config)
    if not config.phases:
        yield "phases=[]: there is nothing to imitate; give at least one, for example phases=[{steps: 1000}]"
    if config.model.path is not None:
        yield from hugging_face_folder("model.path", config.model.path)
        if config.model.architecture:
            yield "model.architecture: a pretrained model has its own; set model.path or model.architecture, not both"
        if config.model.tokenizer is not None:
            yield "model.tokenizer: a pretrained model has its own; set model.path or model.tokenizer, not both"
    elif config.model.tokenizer is not None:
        if not (Path(config.model.tokenizer).expanduser() / "tokenizer_config.json").is_file():
            yield (
                f"model.tokenizer={config.model.tokenizer!r}: no folder with a tokenizer_config.json; give one "
                "that has the tokenizer's files"
            )
        if "vocab_size" not in config.model.architecture:
            yield "model.architecture.vocab_size: missing; a model with model.tokenizer needs the tokenizer's size"


def _loss(config: SFTConfig) -> Iterator[str]:
    """Yield an error message for each problem of the loss, and for each setting that it excludes."""
    loss, lora = config.loss, config.model.lora
    try:
        kind = loss_kind(loss)
    except PluginError as error:
        yield f"loss.name={loss.name!r}: {error}"
        return
    if kind is None:
        if loss.params:
            yield f"loss.params={loss.params}: {CROSS_ENTROPY} has no parameters; leave them out"
        return
    try:
        catalog.check(kind, loss.name, loss.params)
    except ValueError as error:
        yield f"loss.params={loss.params}: {error}"
    given = f"loss.name={loss.name!r}"
    if config.optimizer == OptimizerName.muon:
        yield f"{given}: optimizer=muon learns from demonstrations alone; use optimizer=adamw"
    if config.dataset.train_on != TrainOn.all:
        yield f"{given}: the answers' turns carry loss, so dataset.train_on does nothing; leave it out"
    if kind == REWARD_LOSS and lora.rank:
        yield f"{given}: reward models are trained whole, without adapters; set model.lora.rank=0"
    if kind == LABEL_LOSS and config.batch_size < 2:
        yield f"{given}: a prompt is joined to the answer of another row of its batch; set batch_size to 2 or more"


def _held_out(config: SFTConfig) -> Iterator[str]:
    """Yield an error message for each problem of the rows for the held-out loss."""
    data, held_out = config.dataset, config.eval
    if not held_out.interval:
        return
    if held_out.path is not None:
        yield from source_problems("eval", held_out.path)
    elif is_data_path(data.path) and not data.args.get("held_out_share"):
        yield (
            f"eval.path=null: the held-out loss would be measured on the training file {data.path!r} itself; give it a "
            "file of its own (eval.path=...), hold out a share of this one (dataset.args.held_out_share=0.05), or "
            "switch it off (eval.interval=0)"
        )


def _engine(config: SFTConfig) -> Iterator[str]:
    """Yield an error message for each problem of the settings of optimizer, adapters and layout."""
    lora, parallel = config.model.lora, config.trainer.parallel
    if config.optimizer == OptimizerName.muon:
        given = {"model.lora.rank": lora.rank, "trainer.parallel": None if parallel == "d1" else parallel}
        for name, value in given.items():
            if value:
                yield f"{name}={value}: optimizer=muon trains whole weights in one process; use optimizer=adamw"
    try:
        ranks = WorkerGrid.of(layout_of("trainer.parallel", parallel)).workers
    except ConfigError as error:
        yield str(error)
        return
    gpus = count_gpus()
    if ranks > gpus and (config.device == Device.cuda or (config.device == Device.auto and gpus)):
        yield (
            f"trainer.parallel={parallel!r}: {ranks} ranks want a GPU each and this machine shows {gpus}; use a layout "
            "of that many ranks, or device=cpu"
        )
    if config.optimizer == OptimizerName.adamw and config.lr != MUON_LR:
        yield f"lr={config.lr:g}: it is Muon's rate, and optimizer=adamw has another; set adamw_lr={config.lr:g}"
    if config.optimizer == OptimizerName.muon and config.adamw_lr == 0.0 and config.lr:
        yield f"adamw_lr=0: Muon's rate follows its schedule, so lr={config.lr:g} would be 0 too; set a small adamw_lr"
    if config.optimizer == OptimizerName.muon and config.model.path is not None:
        yield (
            f"model.path={config.model.path!r}: optimizer=muon trains models from scratch, at rates that ruin a "
            "pretrained one; use optimizer=adamw, with adamw_lr=1e-5 or another rate for fine-tuning"
        )
    if lora.publish != LoraPublish.auto:
        yield f"model.lora.publish={str(lora.publish)!r}: no servers load the result, which is merged; leave it out"
    yield from lora_problems(lora, config.model.path)


def wrong_rows(config: SFTConfig) -> Iterator[str]:
    """Yield an error message for each data set with a row that cannot be loaded or has nothing to train on."""
    data = config.dataset
    for phase in config.phases:
        try:
            _check_rows(config, data.path, {**data.args, **phase.args}, data.fields, "train")
        except ValueError as error:
            yield f"dataset.path={error}"
    held_out = config.eval
    if held_out.interval and held_out.path is not None:
        fields = data.fields if held_out.fields is None else held_out.fields
        try:
            _check_rows(config, held_out.path, held_out.args, fields, "held_out")
        except ValueError as error:
            yield f"eval.path={error}"


def _check_rows(config: SFTConfig, path: str, args: Mapping[str, Any], fields: Mapping[str, str], split: str) -> None:
    """Load the rows of supervised training: all rows of a file, one row of a class.

    Raises:
        ValueError: they cannot be loaded, or have nothing to train on; the message names file and line.
    """
    try:
        kind = loss_kind(config.loss)
    except PluginError:  # reported by the check of settings
        return
    dataset = load_demonstrations(path, args, fields, split, config.seed, judged=kind is not None)
    for index in range(len(dataset) if isinstance(dataset, FileDataset) else 1):
        location = dataset.location(index) if isinstance(dataset, Located) else f"{path}, row {index}"
        row = dataset.row(index)
        wrong = None
        try:
            if kind is None:
                wrong = wrong_conversation(conversation_of(dataset, row))
            else:
                judged_answers(row, labelled=kind == LABEL_LOSS)
        except ValueError as error:
            wrong = str(error)
        if wrong is not None:
            raise ValueError(f"{location}: {wrong}")
