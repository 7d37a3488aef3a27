"""The files, data and code that settings name, which hosts without a shared folder get as copies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.import_paths import PluginError, definition, split_path
from asyncrl.config.variants import evaluation_sets, given_code
from asyncrl.data.settings import AUTO, OFF, is_data_path
from asyncrl.plugins.settings import GYMNASIUM

REGISTERED_IN = "algorithm.plugins"
"""Modules that may be meant for other processes. A RolloutWorker loads them only if needed."""


@dataclass(frozen=True, slots=True)
class NamedInput:
    """A setting whose value names a file, a folder of data, or a module.

    Attributes:
        setting, value: name and value of the setting.
        put: sets another value.
        path: the file or folder; None for a module.
        module: the module; empty for a file or folder, and for a part of asyncrl.
        pattern: for a folder of data, pattern of the files that are read; empty for all.
    """

    setting: str
    value: str
    put: Callable[[str], None]
    path: Path | None = None
    module: str = ""
    pattern: str = ""

    def put_path(self, path: Path) -> None:
        """Set the value with `path` in place of its own path."""
        _, _, name = self.value.rpartition(".py:")
        self.put(f"{path}:{name}" if path.suffix == ".py" and name != self.value else str(path))


def named_inputs(config: ExperimentConfig, *, training: bool = True) -> Iterator[NamedInput]:
    """Yield the inputs that `config` names; without `training` those of an evaluation."""
    for group, owner in _data_owners(config, training):
        yield from _data(config, group, owner)
    if (template := config.dataset.chat_template) not in (AUTO, OFF):
        put = partial(setattr, config.dataset, "chat_template")
        yield NamedInput("dataset.chat_template", template, put, Path(template).expanduser())
    for group, owner in _code_owners(config):
        key = "name" if group.startswith("rollout.") else "path"  # a filter's name may be that of a registered one
        value = owner.get(key) if isinstance(owner, Mapping) else getattr(owner, key)
        if value is not None and (key == "path" or ":" in value):
            yield _code(f"{group}.{key}", value, _putter(owner, key))
    for number, value in enumerate(config.algorithm.plugins):
        yield _code(f"{REGISTERED_IN}[{number}]", value, _putter(config.algorithm.plugins, number))
    for text in texts_in_args(config, training=training):
        if _is_import_path(text.value):
            yield _code(text.setting, text.value, text.put)


def texts_in_args(config: ExperimentConfig, *, training: bool = True) -> Iterator[NamedInput]:
    """Yield every text in the `args` and `params` of data, code and filters, but not of MCP servers."""
    for group, owner in [*_data_owners(config, training), *_code_owners(config)]:
        key = "params" if group.startswith("rollout.") else "args"
        values = owner.get(key, {}) if isinstance(owner, Mapping) else getattr(owner, key)
        yield from _texts(f"{group}.{key}", values)


def files_in_args(config: ExperimentConfig, *, training: bool = True) -> Iterator[tuple[str, str]]:
    """Yield, with their settings, values of `args` and `params` that are paths of files here; `~` is each host's home.

    Inputs of `named_inputs` are left out.
    """
    named = {each.setting for each in named_inputs(config, training=training)}
    # a pattern within the data
    named |= {f"{group}.args.files" for group, owner in _data_owners(config, training) if _reads_files(config, owner)}
    for text in texts_in_args(config, training=training):
        if text.setting not in named and is_file(text.value):
            yield text.setting, text.value
    for number, server in enumerate(config.mcp):
        for text in _texts(f"mcp[{number}].args", server.args):
            module, _, name = text.value.rpartition(":")
            path = module if module.endswith(".py") and name.isidentifier() else text.value
            if is_file(path):
                yield text.setting, path


def is_file(value: str) -> bool:
    """True if a text is the path of a file on this host."""
    try:
        return Path(value).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # too long for a path, or ~ of an unknown user
        return False


def _data_owners(config: ExperimentConfig, training: bool) -> list[tuple[str, Any]]:
    """Return the groups of settings of the datasets that are read."""
    due = {each.group: each for each in evaluation_sets(config) if each.interval}
    owners: list[tuple[str, Any]] = []
    if training or any(each.path is None for each in due.values()):
        owners += _numbered("dataset.sources", config.dataset.sources) or [("dataset", config.dataset)]
    sets = _numbered("eval.sets", config.eval.sets) or [("eval", config.eval)]
    return owners + [(group, owner) for group, owner in sets if group in due]


def _code_owners(config: ExperimentConfig) -> list[tuple[str, Any]]:
    """Return the groups of settings that name code: components, those of evaluations, filters and shapings."""
    rewards = _numbered("rewards", config.rewards) or [("reward", config.reward)]
    own = [("agent", config.agent), ("env", config.env), *rewards, *_numbered("tools", config.tools)]
    chosen = _numbered("rollout.filters", config.rollout.filters) + _numbered("rollout.shaping", config.rollout.shaping)
    return own + list(given_code(config)) + chosen


def _numbered(name: str, owners: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"{name}[{number}]", owner) for number, owner in enumerate(owners)]


def _data(config: ExperimentConfig, group: str, owner: Any) -> Iterator[NamedInput]:
    of_training = config.dataset.args if owner is config.eval and owner.path is None else {}
    pattern = str({**of_training, **owner.args}.get("files") or "")
    path = owner.args.get("path")
    if path and _reads_files(config, owner) and is_data_path(str(path)):  # read in place of the setting `path`
        put = _putter(owner.args, "path")
        yield NamedInput(f"{group}.args.path", path, put, Path(path).expanduser(), pattern=pattern)
    if owner.path is None:
        return
    put = partial(_put_source, owner) if group.startswith("dataset.sources") else _putter(owner, "path")
    if is_data_path(owner.path):
        yield NamedInput(f"{group}.path", owner.path, put, Path(owner.path).expanduser(), pattern=pattern)
    else:
        yield _code(f"{group}.path", owner.path, put)


def _reads_files(config: ExperimentConfig, owner: Any) -> bool:
    """True if asyncrl itself reads the dataset's files, rather than a dataset class."""
    return is_data_path(owner.path or config.dataset.path)


def _code(setting: str, value: str, put: Callable[[str], None]) -> NamedInput:
    if value.startswith(GYMNASIUM):  # a registered environment, or module:name of one
        module, colon, _ = value.removeprefix(GYMNASIUM).partition(":")
        return NamedInput(setting, value, put, module=module if colon else "")
    module = split_path(value)[0] if ":" in value else value
    if module.endswith(".py"):
        return NamedInput(setting, value, put, Path(module).expanduser())
    return NamedInput(setting, value, put, module="" if module.partition(".")[0] == "asyncrl" else module)


def _putter(owner: Any, key: Any) -> Callable[[str], None]:
    return partial(owner.__setitem__ if isinstance(owner, dict | list) else partial(setattr, owner), key)


def _put_source(source: Any, value: str) -> None:
    """Set the path of one of several datasets. Its rows are named by the old path unless it has a name."""
    source.name, source.path = source.name or source.path, value


def _texts(name: str, values: Any) -> Iterator[NamedInput]:
    for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        setting = f"{name}.{key}" if isinstance(values, Mapping) else f"{name}[{key}]"
        if isinstance(value, str):
            yield NamedInput(setting, value, _putter(values, key))
        elif isinstance(value, Mapping | list | tuple):
            yield from _texts(setting, value)


def _is_import_path(value: str) -> bool:
    """True if a text in `args` names an object of a local file, or of a module that does not come with Python."""
    module, _, name = value.rpartition(":")
    if not name.isidentifier() or module.partition(".")[0] in sys.stdlib_module_names:
        return False
    if module.endswith(".py"):
        return is_file(module)
    if not all(part.isidentifier() for part in module.split(".")):
        return False
    with suppress(PluginError):
        definition(value)
        return True
    return False
