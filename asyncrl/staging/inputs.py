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
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import xxhash

from asyncrl.comm import names
from asyncrl.comm.http_client import HttpError, JsonHttp
from asyncrl.comm.typed import decode_json
from asyncrl.comm.waits import Backoff
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.catalog import resolve
from asyncrl.config.plugin_code.same_code import how_found, loaded_sources
from asyncrl.config.run_dir import DATA_RECORD_FILE, INPUTS_DIR
from asyncrl.config.setting import ConfigError
from asyncrl.config.variants import evaluation_sets
from asyncrl.data.datasets import Dataset, Located
from asyncrl.data.files import files_of
from asyncrl.data.picture_parts import PictureSource, pictures_of
from asyncrl.data.tokenizers import model_files
from asyncrl.plugins.named_inputs import REGISTERED_IN, files_in_args, is_file, named_inputs, texts_in_args
from asyncrl.rollout.user_code.prompts import Prompts, load_eval_set, load_train_set
from asyncrl.runtime.process.waiting import StopRequested
from asyncrl.runtime.process.worker import AsyncWorker
from asyncrl.staging.client import INPUTS, LAUNCHER_HOST, StagingClient
from asyncrl.weights.manifest import FileEntry, file_entry

_INDEX, _MODEL = "inputs.json", "model"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz"}
_SHOWN_MODULES: Final = 5
_BACKOFF = Backoff(0.2, 5.0)


_SAMPLED_ROWS = 256
"""Number of rows that are compared, because computing the rows of a dataset class may take time."""


def content_sum(dataset: Dataset, folder: Path) -> str:
    """Return the XXH3 of the number of rows, of rows spread evenly over the set and, for files, of every row's
    checksum.

    Rows may contain `folder`, the place of data and code on this host; it is left out of the checksum, because other
    hosts have another folder.
    """
    names = sorted({json.dumps(str(path))[1:-1] for path in (folder, folder.resolve())}, key=len, reverse=True)
    rows = np.unique(np.linspace(0, len(dataset) - 1, _SAMPLED_ROWS).astype(int)).tolist()
    digest = xxhash.xxh3_64(str(len(dataset)).encode())
    for row in rows:
        text = json.dumps(dataset.row(row), skipkeys=True, default=_kind)
        for name in names:
            text = text.replace(name, "")
        digest.update(text.encode())
    if isinstance(dataset, Located):
        digest.update(dataset.sums().tobytes())
    return digest.hexdigest()


def _kind(value: object) -> str:
    """Return a stable name for a value of a user's class, whose text may contain its address."""
    return str(value) if isinstance(value, PictureSource) else type(value).__qualname__


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
    with _errors_of(f"model.path={config.model.path!r}"):
        for name, file in model_files(Path(str(config.model.path)).expanduser()).items():
            if file.suffix not in _WEIGHTS:
                _copy(file, folder / _MODEL / name)
    if training and (run_dir / DATA_RECORD_FILE).is_file():
        _copy(run_dir / DATA_RECORD_FILE, folder / DATA_RECORD_FILE)
    brought: dict[str, str] = {}
    subfolders: dict[tuple[Path, str], str] = {}
    for named in named_inputs(config, training=training):
        if named.path is None:
            continue
        source = named.path.absolute()  # a link keeps its name, which shows the kind of the file
        is_new = (source, named.pattern) not in subfolders
        subfolder = subfolders.setdefault((source, named.pattern), str(len(subfolders)))
        with _errors_of(f"{named.setting}={named.value!r}"):
            for file in files_of(source, named.pattern) if is_new else ():
                _copy(file, folder / subfolder / (file.relative_to(source) if source.is_dir() else file.name))
        brought[named.setting] = subfolder if source.is_dir() else f"{subfolder}/{source.name}"
    same = {}
    for name, path in files_in_args(config, training=training):
        with _errors_of(f"{name}={path!r}"):
            same[name] = SameFile(path, file_entry(Path(path).expanduser()))
    there = copy.deepcopy(config)  # as on a RolloutWorker's host: a row may contain the path of its file
    _put_brought(there, brought, folder, training)
    rows = {}
    sources = {subfolder: source if source.is_dir() else source.parent for (source, _), subfolder in subfolders.items()}
    for group, dataset in _datasets(there, training):
        with _errors_of(f"{group}.path"):
            if isinstance(dataset, Located):
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
                subfolder, *parts = picture.value.relative_to(inside).parts
                original = sources[subfolder].joinpath(*parts)
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
        if each.setting.startswith(REGISTERED_IN):
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
        if (subfolder := brought.get(named.setting)) is not None:
            named.put_path(folder / subfolder)
    config.model.path = str(folder / _MODEL)


def _datasets(config: ExperimentConfig, training: bool) -> Iterator[tuple[str, Dataset]]:
    if training:
        yield "dataset", load_train_set(config)
    yield from ((each.group, load_eval_set(config, each)) for each in evaluation_sets(config) if each.interval)


@contextmanager
def _errors_of(setting: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: {error}") from error


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


class BroughtInputs:
    """Copies of the launcher's inputs, from which a RolloutWorker loads data and code: the host's staging server
    fetches them.

    Args:
        worker: the worker.
        training: True if it has training prompts.
    """

    _copies: Inputs

    def __init__(self, worker: AsyncWorker, training: bool) -> None:
        self._worker, self._training = worker, training

    async def arrive(self) -> Path:
        """Wait until the host's staging server has the worker's input files, and name them in its settings.

        Returns:
            Their folder, which also has the launcher's record of its data.

        Raises:
            ConfigError: a file that must be on this host already is missing or differs.
        """
        worker = self._worker
        key = names.staged_key(INPUTS, worker.config.system.host)
        folder = Path(await worker.registered(key, names.STAGING_SERVER))
        self._copies = await asyncio.to_thread(read_from, folder, worker.config, training=self._training)
        return folder

    async def check(self, prompts: Prompts) -> None:
        """Check that the data of `prompts` and the code that is loaded are the launcher's.

        Raises:
            ConfigError: they differ.
        """
        data, copies = self._worker.config.dataset, self._copies
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
            lines = "; ".join(f"{module} {why}{how_found(module)}" for module, why in shown)
            raise ConfigError(
                f"system.shared_filesystem=false: {len(differences)} module(s) of this host ({config.system.host})"
                f" are not those of the launcher's: {lines}; install the same here, or name code by its file, which is "
                "brought"
            )


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
