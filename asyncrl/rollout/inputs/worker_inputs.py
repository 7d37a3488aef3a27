"""Input files of one RolloutWorker, and checks that its data and code are those of the launcher.

A worker on a host that shares no folder with the launcher's reads copies (`copied.py`). Every worker that trains checks
that it reads the rows that the launcher read, because prompts name rows by number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from asyncrl.comm import names
from asyncrl.comm.http.calls import HttpError, JsonHttp
from asyncrl.comm.waits.backoff import Backoff
from asyncrl.config.plugin_code.same_code import how_found, loaded_sources
from asyncrl.config.run_dir import DATA_RECORD_FILE
from asyncrl.config.setting import ConfigError
from asyncrl.models.weights.staging.client import StagingClient
from asyncrl.models.weights.staging.messages import INPUTS, LAUNCHER_HOST
from asyncrl.plugins.datasets import Dataset
from asyncrl.plugins.datasets.rows.data_fingerprint import DataRecord
from asyncrl.rollout.inputs.copied import Inputs, check_rows, import_named, read_from
from asyncrl.rollout.user_code.prompts import Prompts
from asyncrl.runtime.planning.staging_hosts import brings_inputs
from asyncrl.runtime.process.waiting import StopRequested
from asyncrl.runtime.process.worker import AsyncWorker

_SHOWN_MODULES = 5
_BACKOFF = Backoff(0.2, 5.0)


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
