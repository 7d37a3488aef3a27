"""The policy of a step as a plain Hugging Face folder.

The weights equal those published as that version, bit by bit: they come from its folder if that still exists, else from
the checkpoint, whose fp32 master values are rounded as the trainer rounds them. Files that are not in a checkpoint
(configuration, tokenizer and everything that training never changes) come from any published version.

If adapters were trained, they are merged into the base model in fp32 and rounded to the trainer's type, or written
alone in peft's format.
"""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import (
    CHECKPOINTS_DIR,
    CONFIG_FILE,
    WEIGHTS_DIR,
    read_run_config,
    read_settings,
    versions_in,
)
from asyncrl.config.variants import CRITIC, config_of_policy, policy_and_role
from asyncrl.data.settings import AUTO, OFF
from asyncrl.data.tokenizers import model_files
from asyncrl.models.model_config import CONFIG_FILE as MODEL_CONFIG
from asyncrl.models.model_config import for_all_versions
from asyncrl.models.ranks import Ranks
from asyncrl.models.transformers_internals import language_model_on_meta
from asyncrl.trainer.model.lora import adapter_config, is_adapter
from asyncrl.trainer.model.value_models import as_classifier
from asyncrl.weights.adapters import model_name, published_name
from asyncrl.weights.checkpoint_shards import StoredTensors
from asyncrl.weights.checkpoints import read_state
from asyncrl.weights.folder_tensors import folder_tensors
from asyncrl.weights.logprob_probe import PROBE_FILE
from asyncrl.weights.manifest import ADAPTERS_FILE, MANIFEST_FILE, Manifest, TensorEntry, are_adapters, verify
from asyncrl.weights.publishing import tokenizer_assets, write_model
from asyncrl.weights.stored import ExportError, MergedModel, Read, StoredModel, from_folder
from asyncrl.weights.tensor_file import DTYPE_NAMES, DTYPES
from asyncrl.weights.whole_folder import HEAD, read_tensor

_WEIGHTS = f"{ACTOR}.weights."
"""Prefix of the names of the policy's parameters in a checkpoint."""


def export(run: Path, step: int | None, out: Path, *, adapter: bool = False, policy: str = "") -> int:
    """Write the policy of the run `run` after `step` steps (None: the newest) to the new folder `out`; returns `step`.

    Args:
        adapter: write adapters as they are, not merged.
        policy: one of `policies` that the run trains; empty: its own. `critic` is the critic, which is written as a
            classifier with one label in fp32, and `NAME/critic` that of the policy NAME.

    Raises:
        ExportError: there is no such run, policy or step, or `out` exists; there are no adapters, or their base is
            gone.
        ManifestError, WeightUpdateError, ValueError, OSError: the step's files cannot be read, or `out` cannot be
            written.
    """
    if not (run / CONFIG_FILE).is_file():
        raise ExportError(f"{run} is not a run: it has no {CONFIG_FILE}; give a folder <fileroot>/<experiment>/<trial>")
    if out.exists():
        raise ExportError(f"{out} exists; give a folder that does not")
    if policy:
        config = read_run_config(run)
        if policy_and_role(config, policy)[1] == CRITIC:
            return _export_critic(run, config, step, out, policy)
        if policy not in (trained := config.trained_policies):
            others = f"beside its own it trains {', '.join(trained) or 'none'}; its critic is {CRITIC}"
            raise ExportError(f"{run} trains no policy {policy!r}; {others}")
    role = policy or ACTOR
    published, saved = run / WEIGHTS_DIR / role, run / CHECKPOINTS_DIR
    there = {f"published in {published}": versions_in(published), f"checkpoints in {saved}": versions_in(saved)}
    steps = sorted({version for versions in there.values() for version in versions})
    if step is None and steps:
        step = steps[-1]
    if step is None or step not in steps:
        listed = "; ".join(f"{where}: {', '.join(map(str, versions)) or 'none'}" for where, versions in there.items())
        wanted = "no weights yet" if step is None else f"nothing of step {step}"
        raise ExportError(f"{run} has {wanted}. Steps there are, {listed}")
    is_published = step in versions_in(published)
    template = published / f"v{step}" if is_published else _any_version(published)
    checkpoint = saved / f"v{step}"
    if are_adapters(template):
        read = from_folder(template) if is_published else _from_checkpoint(checkpoint, template)
        _write_adapters(StoredModel(verify(template), read), (template / ADAPTERS_FILE).read_bytes(), out, adapter)
    elif checkpoint.is_dir() and _adapters_in(_opened(checkpoint)) and (adapter or not is_published):
        _write_adapters(*_adapters_of(run, checkpoint, template), out, adapter)
    elif adapter:
        raise ExportError(
            f"{run} has no adapters of step {step}: it trained all weights, or published them merged and has no "
            "checkpoint of that step; leave --adapter out"
        )
    else:
        read = from_folder(template) if is_published else _from_checkpoint(checkpoint, template, role)
        beside = {name: path.read_bytes() for name, path in model_files(template).items() if not _is_ours(path)}
        beside = {name: for_all_versions(name, content) for name, content in beside.items()}
        write_model(StoredModel(verify(template), read), out, beside, Ranks())
    if not adapter:
        _add_chat_template(run, out)
    return step


def _add_chat_template(run: Path, out: Path) -> None:
    """Add the file of `dataset.chat_template`, if the run names one, as the model's own. A relative path is of the
    folder in which the command is given.
    """
    named = read_settings(run)["dataset"].get("chat_template", OFF)
    if named in (AUTO, OFF):
        return
    if (file := Path(named).expanduser().absolute()).is_file():
        shutil.copyfile(file, out / "chat_template.jinja")
        print(f"chat template: {file}")
    else:
        print(f"WARNING: no chat template: {file} is not there, with which the model was trained; copy it to {out}")


def _export_critic(run: Path, config: ExperimentConfig, step: int | None, out: Path, role: str) -> int:
    """Write the critic `role` of a checkpoint as transformers' classifier, whose head gives its outputs."""
    saved = run / CHECKPOINTS_DIR
    steps = versions_in(saved)
    if not steps or (step is not None and step not in steps):
        raise ExportError(f"{saved} has no checkpoint{f' of step {step}' if step else ''}: a critic is only there")
    step = steps[-1] if step is None else step
    stored, own = _opened(saved / f"v{step}"), config_of_policy(config, policy_and_role(config, role)[0])
    prefix, base = f"{role}.weights.", Path(str(own.algorithm.critic.path or own.model.path)).expanduser()
    if f"{prefix}head.weight" not in stored.shapes:
        raise ExportError(f"{run} has no critic {role!r} in its checkpoint of step {step}; algorithm.graph=ppo has one")
    kind: Any = AutoModelForSequenceClassification
    if f"{prefix}head.bias" in stored.shapes:  # a sequence classifier's head has none
        kind = AutoModelForTokenClassification
    described = as_classifier(AutoConfig.from_pretrained(base))
    with torch.device("meta"):
        model = kind.from_config(described)
    described.architectures, described.dtype = [type(model).__name__], torch.float32
    parts, trunk = {part.name: part for part in folder_tensors(model)}, f"{model.base_model_prefix}."

    def read(name: str, entry: TensorEntry) -> Tensor:
        part = parts[name]
        inner = part.parameter.removeprefix(trunk)
        key = f"{prefix}trunk.{inner}" if inner != part.parameter else prefix + inner.replace(HEAD, "head", 1)
        if key not in stored.shapes:  # a buffer, which is not trained
            return read_tensor(base, name).float()
        return part.of(stored.read(key)).float().contiguous()

    entries = {name: TensorEntry(part.shape, DTYPE_NAMES[torch.float32], "") for name, part in parts.items()}
    beside = {name: path.read_bytes() for name, path in tokenizer_assets(base).items()}
    beside[MODEL_CONFIG] = described.to_json_string(use_diff=True).encode()
    beside = {name: for_all_versions(name, content) for name, content in beside.items()}
    write_model(StoredModel(Manifest(role, step, {}, entries), read), out, beside, Ranks())
    return step


def _write_adapters(stored: StoredModel, config: bytes, out: Path, adapter: bool) -> None:
    """Write adapters, described by `config`, to `out`: alone if `adapter`, else merged into their base."""
    if adapter:
        write_model(stored, out, {ADAPTERS_FILE: config}, Ranks(), adapters=True)
    else:
        merged = MergedModel(stored, config)
        write_model(merged, out, merged.beside(), Ranks())


def _adapters_in(stored: StoredTensors) -> dict[str, str]:
    """Return the keys of the policy's adapters in a checkpoint, by their names in peft's folder."""
    keys = [key for key in sorted(stored.shapes) if key.startswith(_WEIGHTS) and is_adapter(key)]
    return {published_name(key.removeprefix(_WEIGHTS)): key for key in keys}


def _adapters_of(run: Path, checkpoint: Path, published: Path) -> tuple[StoredModel, bytes]:
    """Return the adapters in `checkpoint` of a run that published merged weights, and their configuration."""
    stored, model = _opened(checkpoint), read_run_config(run).model
    keys = _adapters_in(stored)
    dtype = next(iter(verify(published).tensors.values())).dtype  # the type in which the trainer holds the base
    entries = {name: TensorEntry(tuple(stored.shapes[key]), dtype, "") for name, key in keys.items()}

    def read(name: str, entry: TensorEntry) -> Tensor:
        return stored.read(keys[name]).to(DTYPES[entry.dtype]).contiguous()

    adapters = StoredModel(Manifest(ACTOR, 0, {}, entries), read)
    specs, model_config = adapters.published_specs(), AutoConfig.from_pretrained(published)
    return adapters, adapter_config(model.lora, str(model.path), specs, model_config)


def _opened(checkpoint: Path) -> StoredTensors:
    verify(checkpoint)
    read_state(checkpoint)
    return StoredTensors(checkpoint)


def _from_checkpoint(checkpoint: Path, template: Path, role: str = ACTOR) -> Read:
    stored, other = _opened(checkpoint), from_folder(template)

    parts = {}  # the place of each tensor of the model's folder within the parameters of the checkpoint
    if not are_adapters(template):
        model = language_model_on_meta(AutoConfig.from_pretrained(template))
        parts = {part.name: part for part in folder_tensors(model)}
    parameter = lru_cache(maxsize=1)(stored.read)  # the next tensor may be a part of the same parameter

    def read(name: str, entry: TensorEntry) -> Tensor:
        part = parts.get(name)
        key = f"{role}.weights.{model_name(name) if part is None else part.parameter}"
        if key not in stored.shapes:
            return other(name, entry)
        whole = parameter(key)
        return (whole if part is None else part.of(whole)).to(DTYPES[entry.dtype]).contiguous()

    return read


def _any_version(published: Path) -> Path:
    """Return a published version, for the files that all versions share."""
    versions = versions_in(published)
    if not versions:
        raise ExportError(
            f"{published} has no version: a checkpoint holds neither configuration nor tokenizer, which come from one; "
            "continue the run for a step, or give the step of a run that has published"
        )
    return published / f"v{versions[-1]}"


def _is_ours(path: Path) -> bool:
    return path.name in (MANIFEST_FILE, PROBE_FILE) or path.name.endswith((".safetensors", ".safetensors.index.json"))
