"""The models that a start loads: the base model, made first if necessary; the check that each model's files hold all of
it.

A child process asks transformers (`asyncrl.weights.whole_folder`), since launchers load no torch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from asyncrl.comm.names import ACTOR
from asyncrl.comm.typed import decode_json
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import Config, load_supervised
from asyncrl.config.optional_checks import optional_problems
from asyncrl.config.setting import ConfigError
from asyncrl.config.variants import CRITIC, REFERENCE, config_of_policy, policy_and_role
from asyncrl.launch.before_start.setting_checks import resolve_hub_names, supervised_checks, validate
from asyncrl.master.graph import load_graph
from asyncrl.models.folder_checks import ModelPart, WantedFolder, hugging_face_folder
from asyncrl.runtime.plan import with_types
from asyncrl.trainer.supervised.base_model import ensure_base_model, existing_base_model
from asyncrl.trainer.supervised.settings import SFTConfig


def with_model(config: ExperimentConfig, folder: Path | None) -> ExperimentConfig:
    """Return the config with its types and with a folder as `model.path`: the set one, or the base model, made first if
    necessary.

    Raises:
        ConfigError: a model that scores answers does not have the base model's tokenizer.
    """
    if config.model.path is not None:
        path = Path(config.model.path).expanduser().resolve()
    else:
        path = ensure_base_model(base_model_config(config, folder))
    made = with_types(replace(config, model=replace(config.model, path=str(path))))
    if wrong := list(optional_problems(made, "other_tokenizers")):
        raise ConfigError("\n".join(wrong))
    return made


def base_model_config(config: ExperimentConfig, folder: Path | None) -> SFTConfig:
    """Return the experiment that makes the base model of `config`; `folder` has the user's experiments.

    Raises:
        ConfigError: there is no such experiment, or one of its settings is wrong.
    """
    name = config.model.base_experiment
    try:
        base = replace(load_supervised(name, folder), fileroot=config.fileroot)
        resolve_hub_names(base)
        made = None
        with suppress(OSError, TypeError, ValueError):  # of a wrong setting, which `validate` names
            made = existing_base_model(base)
        if made is None:  # a recipe that has made its model is valid
            validate(base)
    except ConfigError as error:
        lines = (f"model.base_experiment={name!r}: {line}" for line in str(error).splitlines())
        raise ConfigError("\n".join(lines)) from error
    return base


LIMIT_S = 300.0
"""Longest time, in s, for the check: reading the headers of a large model from a slow disk."""
_PROGRAM = "asyncrl.weights.whole_folder"


@contextmanager
def whole_models(folders: Iterator[WantedFolder]) -> Iterator[Callable[[], None]]:
    """Begin the check of `folders`. The function given to the block waits for its end.

    Raises:
        ConfigError: by the given function, with a message for each model whose files do not hold all of it.
    """
    wanted = list({(each.path, each.part): each for each in folders}.values())
    if not wanted:
        yield lambda: None
        return
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        asked.write(msgspec.json.encode(wanted))
        asked.seek(0)
        process = subprocess.Popen([sys.executable, "-m", _PROGRAM], stdin=asked, stdout=output, stderr=errors)

        def wait() -> None:
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                raise ConfigError(f"the models' files were not checked within {LIMIT_S:g} s") from None
            output.seek(0)
            errors.seek(0)
            if code:
                last = errors.read().decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {code}"]
                raise ConfigError(f"the models' files cannot be checked: {last[0]}")
            if faults := decode_json(output.read(), list[str]):
                raise ConfigError("\n".join(faults))

        try:
            yield wait
        finally:
            process.kill()
            process.wait()


def check_models(config: SFTConfig) -> None:
    """As `whole_models`, for the model of `config` and at once.

    Raises:
        ConfigError: see `whole_models`.
    """
    with whole_models(loaded_folders(config)) as wait:
        wait()


def loaded_folders(config: Config, *, evaluates: bool = False) -> Iterator[WantedFolder]:
    """Yield each model folder that the launch loads.

    Args:
        evaluates: the launch trains nothing.
    """
    if not isinstance(config, ExperimentConfig):
        makes = supervised_checks()
        part = ModelPart.trunk if makes.loss_kind(config.loss) == makes.REWARD_LOSS else ModelPart.language
        yield from _wanted("model.path", config.model.path, part)
        return
    yield from _wanted("model.path", config.model.path, ModelPart.language)
    for policy in config.policies:
        setting = f"policies: {policy.name!r}: path"
        as_it_is = not policy.trained and config.generation.engine.loads_quantised
        packed = as_it_is and policy.path is not None and any(hugging_face_folder(setting, policy.path))
        yield from _wanted(setting, None if packed else policy.path, ModelPart.language)
    if evaluates:
        return
    graph = load_graph(config)
    for role in graph.roles():
        name, own = policy_and_role(config, role)
        model, algorithm = config_of_policy(config, name).model, config_of_policy(config, name).algorithm
        whose = f"policies: {name!r}: " if name else ""
        if own == CRITIC:
            setting, path = f"{whose}algorithm.critic.path", algorithm.critic.path
            if path is None:
                setting, path = "model.path", model.path
            yield from _wanted(setting, path, ModelPart.trunk)
        elif own == REFERENCE:
            yield from _wanted(f"{whose}algorithm.reference.path", algorithm.reference.path, ModelPart.language)
        elif (teacher := algorithm.teacher_of(own)) is not None:
            yield from _wanted(f"{whose}algorithm.teachers: {teacher.name!r}: path", teacher.path, ModelPart.language)
        elif own != ACTOR:
            paths = [str(call.args["path"]) for call in graph.calls if call.role == role and "path" in call.args]
            yield from _wanted(f"algorithm.graph: {role}: path", next(iter(paths), None), ModelPart.reward)


def _wanted(setting: str, path: str | None, part: ModelPart) -> Iterator[WantedFolder]:
    if path is not None:
        yield WantedFolder(setting, path, part)
