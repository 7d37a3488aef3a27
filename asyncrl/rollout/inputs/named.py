"""The settings that name a RolloutWorker's inputs: data, code, and files as values of `args`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.evaluation_sets import evaluation_sets, given_code
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.import_paths import PluginError, definition, split_path
from asyncrl.plugins.datasets.rows.readers import is_data_path
from asyncrl.plugins.datasets.settings import AUTO, OFF
from asyncrl.plugins.envs.settings import GYMNASIUM

_REGISTERED_IN = "algorithm.plugins"


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

    def with_path(self, path: Path) -> str:
        """Return the setting's value with `path` in place of its own path."""
        _, _, name = self.value.rpartition(".py:")
        return f"{path}:{name}" if path.suffix == ".py" and name != self.value else str(path)

    @property
    def may_hold_more(self) -> bool:
        """True if the module may be meant for other processes. A RolloutWorker then loads it only if needed."""
        return self.setting.startswith(_REGISTERED_IN)


def named_inputs(config: ExperimentConfig, *, training: bool = True) -> Iterator[NamedInput]:
    """Yield the inputs that `config` names; without `training` those of an evaluation."""
    yield from _data(config, training)
    if config.dataset.chat_template not in (AUTO, OFF):
        template = config.dataset.chat_template
        put = _putter(config.dataset, "chat_template")
        yield NamedInput("dataset.chat_template", template, put, Path(template).expanduser())
    for group, owner in _components(config):
        yield _code(f"{group}.path", owner.path, _putter(owner, "path"))
    for group, given in given_code(config):
        if "path" in given:
            yield _code(f"{group}.path", given["path"], _item_putter(given, "path"))
    for group, choice in _choices(config):
        if ":" in choice.name:
            yield _code(f"{group}.name", choice.name, _putter(choice, "name"))
    for number, named in enumerate(config.algorithm.plugins):
        yield _code(f"{_REGISTERED_IN}[{number}]", named, _item_putter(config.algorithm.plugins, number))
    for text in texts_in_args(config, training=training):
        if _is_import_path(text.value):
            yield _code(text.setting, text.value, text.put)


def texts_in_args(config: ExperimentConfig, *, training: bool = True) -> Iterator[NamedInput]:
    """Yield every text in the `args` and `params` of data, code and filters, but not of MCP servers."""
    for group, owner in _data_owners(config, training) + _components(config):
        yield from _texts(f"{group}.args", owner.args)
    for group, given in given_code(config):
        yield from _texts(f"{group}.args", given.get("args", {}))
    for group, choice in _choices(config):
        yield from _texts(f"{group}.params", choice.params)


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


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting that other hosts cannot find: `setting=value: problem; fix`."""
    commands = [(f"mcp[{number}].command", server.command) for number, server in enumerate(config.mcp)]
    started = [(name, path) for name, path in commands if "/" in path and is_file(path)]  # others are found on PATH
    for name, path in [*started, *files_in_args(config)]:
        if not Path(path).expanduser().is_absolute():
            yield (
                f"{name}={path!r}: is relative to the current folder, which RolloutWorkers on other hosts do not have "
                "(system.shared_filesystem=false); give a whole path, and put the same file there on each host"
            )


def _data(config: ExperimentConfig, training: bool) -> Iterator[NamedInput]:
    for group, owner in _data_owners(config, training):
        of_training = config.dataset.args if owner is config.eval and owner.path is None else {}
        pattern = str({**of_training, **owner.args}.get("files") or "")
        if _reads_files(config, owner) and _is_data(
            in_args := owner.args.get("path")
        ):  # read in place of the setting `path`
            put = _item_putter(owner.args, "path")
            yield NamedInput(f"{group}.args.path", in_args, put, Path(in_args).expanduser(), pattern=pattern)
        if owner.path is None:
            continue
        put = _source_putter(owner) if group.startswith("dataset.sources") else _putter(owner, "path")
        if is_data_path(owner.path):
            path = Path(owner.path).expanduser()
            yield NamedInput(f"{group}.path", owner.path, put, path, pattern=pattern)
        else:
            yield _code(f"{group}.path", owner.path, put)


def _reads_files(config: ExperimentConfig, owner: Any) -> bool:
    """True if asyncrl itself reads the dataset's files, rather than a dataset class."""
    return is_data_path(owner.path or config.dataset.path)


def _is_data(path: Any) -> bool:
    return bool(path) and is_data_path(str(path))


def _data_owners(config: ExperimentConfig, training: bool) -> list[tuple[str, Any]]:
    """Return the groups of settings of the datasets that are read."""
    due = {each.group: each for each in evaluation_sets(config) if each.interval}
    owners: list[tuple[str, Any]] = []
    if training or any(each.path is None for each in due.values()):
        sources = [(f"dataset.sources[{number}]", source) for number, source in enumerate(config.dataset.sources)]
        owners += sources or [("dataset", config.dataset)]
    sets: list[tuple[str, Any]] = [(f"eval.sets[{number}]", each) for number, each in enumerate(config.eval.sets)]
    return owners + [(group, owner) for group, owner in sets or [("eval", config.eval)] if group in due]


def _components(config: ExperimentConfig) -> list[tuple[str, Any]]:
    rewards: list[tuple[str, Any]] = [(f"rewards[{number}]", part) for number, part in enumerate(config.rewards)]
    tools = [(f"tools[{number}]", tool) for number, tool in enumerate(config.tools)]
    return [("agent", config.agent), ("env", config.env), *(rewards or [("reward", config.reward)]), *tools]


def _choices(config: ExperimentConfig) -> Iterator[tuple[str, Any]]:
    for kind in ("filters", "shaping"):
        for number, choice in enumerate(getattr(config.rollout, kind)):
            yield f"rollout.{kind}[{number}]", choice


def _code(setting: str, value: str, put: Callable[[str], None]) -> NamedInput:
    if value.startswith(GYMNASIUM):  # a registered environment, or module:name of one
        module, colon, _ = value.removeprefix(GYMNASIUM).partition(":")
        return NamedInput(setting, value, put, module=module if colon else "")
    module = split_path(value)[0] if ":" in value else value
    if module.endswith(".py"):
        return NamedInput(setting, value, put, Path(module).expanduser())
    return NamedInput(setting, value, put, module="" if module.partition(".")[0] == "asyncrl" else module)


def _putter(owner: Any, field: str) -> Callable[[str], None]:
    return lambda value: setattr(owner, field, value)


def _item_putter(values: Any, key: Any) -> Callable[[str], None]:
    return lambda value: values.__setitem__(key, value)


def _source_putter(source: Any) -> Callable[[str], None]:
    """Return a setter for the path of one of several datasets.

    Its rows are named by the old path unless it has a name.
    """

    def put(value: str) -> None:
        source.name = source.name or source.path
        source.path = value

    return put


def _texts(name: str, values: Any) -> Iterator[NamedInput]:
    for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        setting = f"{name}.{key}" if isinstance(values, Mapping) else f"{name}[{key}]"
        if isinstance(value, str):
            yield NamedInput(setting, value, _item_putter(values, key))
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
    try:
        definition(value)
    except PluginError:
        return False
    return True


def is_file(value: str) -> bool:
    """True if a text is the path of a file on this host."""
    try:
        return Path(value).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # too long for a path, or ~ of an unknown user
        return False
