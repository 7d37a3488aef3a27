"""Inputs of RolloutWorkers on hosts that share no folder with the launcher's host.

The launcher copies the files that settings name into one folder when the run begins. Staging servers copy the folder to
every host, checked byte by byte like the model. All RolloutWorkers of the run read it, also those on the launcher's
host:

    <run_dir>/inputs/
        inputs.json          `Inputs`: the place of each setting's files, and the values to compare
        data_record.json     record of the training data when the trial began
        model/               files of the model's folder other than weights
        0/my_rewards.py      files that settings name: code, data, a chat template
        1/train-0.parquet, 1/train-1.parquet

Everything else is compared when a worker starts; a difference ends the worker and names the setting:

- The rows of every dataset: their number, and the content of some (`content_sum`).
- Files that are values of `args`, except code: they must be the same under the same path on each host.
- Code that is named as a module, and all that it imports when it is loaded (`asyncrl.config.plugin_code.same_code`).

Every worker that trains, also with a shared folder, checks that it reads the rows that the launcher read, because
prompts name rows by number.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.comm import names
from asyncrl.comm.http.calls import HttpError, JsonHttp
from asyncrl.comm.typed import decode_json
from asyncrl.comm.waits.backoff import Backoff
from asyncrl.config.evaluation_sets import evaluation_sets, given_code
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.catalog import resolve
from asyncrl.config.plugin_code.import_paths import PluginError, definition, split_path
from asyncrl.config.plugin_code.same_code import how_found, loaded_sources
from asyncrl.config.run_dir import DATA_RECORD_FILE, INPUTS_DIR
from asyncrl.config.setting import ConfigError
from asyncrl.models.weights.staging.client import StagingClient
from asyncrl.models.weights.staging.messages import INPUTS, LAUNCHER_HOST
from asyncrl.models.weights.versions.manifest import FileEntry, file_entry
from asyncrl.plugins.datasets import Dataset, Placed
from asyncrl.plugins.datasets.rows.data_fingerprint import DataRecord, content_sum
from asyncrl.plugins.datasets.rows.readers import files_of, is_data_path
from asyncrl.plugins.datasets.settings import AUTO, OFF
from asyncrl.plugins.datasets.templates.picture_parts import PictureSource, pictures_of
from asyncrl.plugins.datasets.tokenizers import model_files
from asyncrl.plugins.envs.settings import GYMNASIUM
from asyncrl.rollout.user_code.prompts import Prompts, load_eval_set, load_train_set
from asyncrl.runtime.planning.staging_hosts import brings_inputs
from asyncrl.runtime.process.waiting import StopRequested
from asyncrl.runtime.process.worker import AsyncWorker

_INDEX, _MODEL = "inputs.json", "model"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz"}
_REGISTERED_IN = "algorithm.plugins"
"""Modules that may be meant for other processes. A RolloutWorker loads them only if needed."""
_SHOWN_MODULES = 5
_BACKOFF = Backoff(0.2, 5.0)


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
        yield _code(f"{_REGISTERED_IN}[{number}]", value, _putter(config.algorithm.plugins, number))
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


def not_on_other_hosts(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting that other hosts cannot find: `setting=value: problem; fix`."""
    commands = [(f"mcp[{number}].command", server.command) for number, server in enumerate(config.mcp)]
    started = [(name, path) for name, path in commands if "/" in path and is_file(path)]  # others are found on PATH
    for name, path in [*started, *files_in_args(config)]:
        if not Path(path).expanduser().is_absolute():
            yield (
                f"{name}={path!r}: is relative to the current folder, which RolloutWorkers on other hosts do not have "
                "(system.shared_filesystem=false); give a whole path, and put the same file there on each host"
            )


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


class SameFile(msgspec.Struct, frozen=True):
    """A file that must be the same under the same path on every host."""

    path: str
    content: FileEntry


class Inputs(msgspec.Struct, frozen=True):
    """Content of the folder, and values to compare.

    Attributes:
        brought: by setting, the place in the folder of the file or folder that it names.
        rows: by group of settings, the `content_sum` of its dataset.
        same: by setting, the files that must be on each host already.
        folder: path of the folder on this host.
    """

    brought: dict[str, str]
    rows: dict[str, str]
    same: dict[str, SameFile]
    folder: str = ""

    @classmethod
    def read(cls, folder: Path) -> Inputs:
        """Read what `bring_inputs` wrote into `folder`."""
        inputs = decode_json((folder / _INDEX).read_bytes(), cls)
        return msgspec.structs.replace(inputs, folder=str(folder))


def bring_inputs(config: ExperimentConfig, run_dir: Path, *, training: bool = True) -> None:
    """Copy the files that RolloutWorkers read into `run_dir`, from which staging servers fetch them.

    Args:
        config: settings whose `model.path` is a folder.
        training: True if the workers train; otherwise they read evaluation sets only.

    Raises:
        ConfigError: a dataset cannot be loaded, or a file cannot be read or copied.
    """
    folder = run_dir / INPUTS_DIR
    shutil.rmtree(folder, ignore_errors=True)
    with _told_as(f"model.path={config.model.path!r}"):
        for name, file in model_files(Path(str(config.model.path)).expanduser()).items():
            if file.suffix not in _WEIGHTS:
                _copy(file, folder / _MODEL / name)
    if training and (run_dir / DATA_RECORD_FILE).is_file():
        _copy(run_dir / DATA_RECORD_FILE, folder / DATA_RECORD_FILE)
    brought: dict[str, str] = {}
    places: dict[tuple[Path, str], str] = {}
    for named in named_inputs(config, training=training):
        if named.path is None:
            continue
        source = named.path.absolute()  # a link keeps its name, which shows the kind of the file
        is_new = (source, named.pattern) not in places
        place = places.setdefault((source, named.pattern), str(len(places)))
        with _told_as(f"{named.setting}={named.value!r}"):
            for file in files_of(source, named.pattern) if is_new else ():
                _copy(file, folder / place / (file.relative_to(source) if source.is_dir() else file.name))
        brought[named.setting] = place if source.is_dir() else f"{place}/{source.name}"
    same = {}
    for name, path in files_in_args(config, training=training):
        with _told_as(f"{name}={path!r}"):
            same[name] = SameFile(path, file_entry(Path(path).expanduser()))
    there = copy.deepcopy(config)  # as on a RolloutWorker's host: a row may contain the path of its file
    _put_brought(there, brought, folder, training)
    rows = {}
    sources = {place: source if source.is_dir() else source.parent for (source, _), place in places.items()}
    for group, dataset in _datasets(there, training):
        with _told_as(f"{group}.path"):
            if isinstance(dataset, Placed):
                _copy_pictures(dataset, folder, sources)
            rows[group] = content_sum(dataset, folder)
    (folder / _INDEX).write_bytes(msgspec.json.encode(Inputs(brought, rows, same)))


def _copy_pictures(dataset: Dataset, folder: Path, sources: Mapping[str, Path]) -> None:
    """Copy the picture files that rows name, from below the folder that their data came from.

    Args:
        dataset: loaded from the copies in `folder`, so that its rows have the pictures' paths there.
        sources: by name of a folder in `folder`, the original folder.
    """
    inside = folder.resolve()
    for number in range(len(dataset)):
        prompt = dataset.row(number).get("prompt")
        for picture in pictures_of(prompt) if isinstance(prompt, list) else ():
            if isinstance(picture, PictureSource) and isinstance(picture.value, Path) and not picture.value.exists():
                place, *parts = picture.value.relative_to(inside).parts
                original = sources[place].joinpath(*parts)
                if original.is_file():  # a row with a missing picture is left out on every host
                    _copy(original, picture.value)


def read_from(folder: Path, config: ExperimentConfig, *, training: bool = True) -> Inputs:
    """Change `config` to name the files in `folder`, and check the files that must be on this host already.

    Raises:
        ConfigError: files are missing or differ; the message names all of them.
    """
    inputs = Inputs.read(folder)
    wrong = []
    for name, file in inputs.same.items():
        if not is_file(file.path):
            wrong.append(f"{name}={file.path!r}: this host has no such file; put a copy of the launcher's there")
        elif file_entry(Path(file.path).expanduser()) != file.content:
            wrong.append(
                f"{name}={file.path!r}: is another file on this host than on the launcher's; copy that one here"
            )
    if wrong:
        raise ConfigError("\n".join(wrong))
    _put_brought(config, inputs.brought, folder, training)
    return inputs


def check_rows(inputs: Inputs, group: str, path: str, dataset: Dataset) -> None:
    """Check that the dataset of the setting `<group>.path` has the rows that the launcher found.

    Raises:
        ConfigError: its rows differ.
    """
    if content_sum(dataset, Path(inputs.folder)) != inputs.rows[group]:
        raise ConfigError(
            f"{group}.path={path!r}: makes other rows on this host than on the launcher's; have it read the same data "
            "here, with the same versions of the packages that it uses"
        )


def import_named(config: ExperimentConfig, *, training: bool = True) -> set[str]:
    """Import the modules that settings name. Return their top-level packages.

    Raises:
        ConfigError: one cannot be imported.
    """
    named = [each for each in named_inputs(config, training=training) if each.module]
    for each in named:
        if each.setting.startswith(_REGISTERED_IN):
            continue
        try:
            importlib.import_module(each.module)
        except Exception as error:  # a user's module may raise anything
            raise ConfigError(
                f"{each.setting}={each.value!r}: module {each.module!r} cannot be imported on this host "
                f"({type(error).__name__}: {error}); install it here, or name its file, which is brought to every host"
            ) from error
    for kind, choices in (("filter", config.rollout.filters), ("shaping", config.rollout.shaping)):
        for choice in choices:
            resolve(kind, choice.name, choice.params, config.algorithm.plugins)
    return {each.module.partition(".")[0] for each in named}


def _put_brought(config: ExperimentConfig, brought: Mapping[str, str], folder: Path, training: bool) -> None:
    for named in [*named_inputs(config, training=training), *texts_in_args(config, training=training)]:
        if (place := brought.get(named.setting)) is not None:
            named.put_path(folder / place)
    config.model.path = str(folder / _MODEL)


def _datasets(config: ExperimentConfig, training: bool) -> Iterator[tuple[str, Dataset]]:
    if training:
        yield "dataset", load_train_set(config)
    yield from ((each.group, load_eval_set(config, each)) for each in evaluation_sets(config) if each.interval)


@contextmanager
def _told_as(setting: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: {error}") from error


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


class WorkerInputs:
    """The files from which a worker loads data and code. Call `arrive`, load, then `check`.

    Args:
        worker: the worker.
        training: True if it has training prompts.
    """

    def __init__(self, worker: AsyncWorker, *, training: bool) -> None:
        self._worker, self._training = worker, training
        self._data_record = worker.run_dir / DATA_RECORD_FILE
        self._copies: Inputs | None = None

    async def arrive(self) -> None:
        """Wait until the host's staging server has the worker's input files, and name them in its settings.

        Returns at once if the worker reads the files at their own paths.

        Raises:
            ConfigError: a file that must be on this host already is missing or differs.
        """
        worker = self._worker
        if not brings_inputs(worker.config):
            return
        key = names.staged_key(INPUTS, worker.config.system.host)
        folder = Path(await worker.registered(key, names.STAGING_SERVER))
        self._data_record = folder / DATA_RECORD_FILE
        self._copies = await asyncio.to_thread(read_from, folder, worker.config, training=self._training)

    async def check(self, prompts: Prompts) -> None:
        """Check that the data of `prompts` and the code that is loaded are the launcher's.

        Raises:
            ConfigError: they differ.
        """
        data = self._worker.config.dataset
        if self._training:
            check_same_data(self._data_record, prompts.train_set, data.path)
        if (copies := self._copies) is None:
            return
        if self._training:
            await asyncio.to_thread(check_rows, copies, "dataset", data.path, prompts.train_set)
        for each, rows in prompts.eval_sets.values():
            await asyncio.to_thread(check_rows, copies, each.group, each.path or data.path, rows)
        await self._check_same_code()

    async def _check_same_code(self) -> None:
        config = self._worker.config
        sums = loaded_sources(import_named(config, training=self._training))
        if differences := await code_differences(self._worker, sums):
            shown = list(differences.items())[:_SHOWN_MODULES]
            told = "; ".join(f"{module} {why}{how_found(module)}" for module, why in shown)
            raise ConfigError(
                f"system.shared_filesystem=false: {len(differences)} module(s) of this host ({config.system.host})"
                f" are not those of the launcher's: {told}; install the same here, or name code by its file, which is "
                "brought"
            )


def check_same_data(record: Path, rows: Dataset, path: str) -> None:
    """Check that `rows` are those that the launcher read.

    Args:
        record: the launcher's record of its data; without the file nothing is checked.
        rows: the training set.
        path: `dataset.path`.

    Raises:
        ConfigError: the data changed since the launcher read it.
    """
    if record.is_file() and (difference := DataRecord.read(record).difference(rows, path)) is not None:
        raise ConfigError(f"dataset.path={difference}: the data changed while the run started; start it again")


async def code_differences(worker: AsyncWorker, sums: Mapping[str, str]) -> dict[str, str]:
    """Ask the staging server on the launcher's host how this host's code differs. If that server died, ask its
    successor.

    Args:
        worker: finds the server.
        sums: checksum of each module that is loaded here.

    Raises:
        HttpError: no server answers within `system.start_timeout_s`.
        StopRequested: a stop was requested.
    """
    http, clock = JsonHttp(worker.http_security), asyncio.get_running_loop().time
    deadline, failures = clock() + worker.config.system.start_timeout_s, 0
    try:
        while True:
            url = await worker.registered(names.staging_server_key(LAUNCHER_HOST), names.STAGING_SERVER)
            try:
                return await StagingClient(http, url).code_differences(sums)
            except HttpError as error:
                if clock() > deadline:
                    raise
                worker.log.warning("this host's code is not compared yet: %s", error)
            failures += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(worker.stop.wait(), _BACKOFF.delay(failures))
                raise StopRequested
    finally:
        await http.close()
