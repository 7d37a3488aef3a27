"""A trial that continues from a checkpoint: it does so with the data and roles that it began with."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import DATA_RECORD_FILE, LEDGER_DIR, METRICS_FILE, DamagedFile, run_dir_of
from asyncrl.config.variants import is_changing
from asyncrl.data.datasets import DataRecord
from asyncrl.master.graph import load_graph
from asyncrl.observe.tail import read_rows
from asyncrl.rollout.user_code.prompts import load_train_set
from asyncrl.runtime.trials.claim import TrialError
from asyncrl.runtime.trials.resume import ADVICE, StoredProgress, newest_progress
from asyncrl.verify.audit.ledger_files import read_ledger


def check_continued(config: ExperimentConfig) -> Iterator[str]:
    """Check that the trial can continue with `config` from its newest checkpoint, if it has one; yield a line for each
    part of its past that is damaged or gone.

    Raises:
        TrialError: see `check_same_data` and `check_same_roles`.
        DamagedFile: see `check_same_data`.
    """
    if (progress := newest_progress(run_dir_of(config))) is not None:
        yield from check_same_data(config, progress)
        check_same_roles(config, progress)
        yield from missing_history(config, progress)


def check_same_data(config: ExperimentConfig, progress: StoredProgress) -> Iterator[str]:
    """Compare the training data with the data at the trial's start. Yield a line if the record of those is gone:
    `keep_data_record` writes it again.

    Raises:
        TrialError: the data differ; the message names the file and the first line that differs.
        DamagedFile: the record is not the one that the checkpoint was made with.
    """
    file = run_dir_of(config) / DATA_RECORD_FILE
    train_set = load_train_set(config)
    try:
        record = DataRecord.read(file)
        difference = record.difference(train_set, config.dataset.path)
    except FileNotFoundError:
        record, difference = DataRecord.of(train_set), None
        if progress.data_record is None:
            yield f"{file} is missing: nothing tells whether the training data are those that the trial began with"
        elif record.checksum == progress.data_record:
            yield f"{file} was missing, and is written again: the training data are those of the trial's checkpoint"
        else:
            difference = f"{config.dataset.path!r} has other rows than those that the trial began with ({file} is gone)"
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFile(file, f"it is damaged: {str(error)[:200]}") from error
    if difference is None and progress.data_record not in (None, record.checksum):
        raise DamagedFile(file, f"it is not the one that checkpoint v{progress.version} was made with")
    if difference is not None:
        raise TrialError(
            f"dataset.path={difference}. Which prompts are used is known by row, so its checkpoint cannot be continued "
            f"with other rows: put the data back as it was, {ADVICE}"
        )


def check_same_roles(config: ExperimentConfig, progress: StoredProgress) -> None:
    """Check that the checkpoint has every role whose weights change in this run.

    Raises:
        TrialError: it lacks one: the arguments or the code of the graph have changed.
    """
    wanted = [role for role in load_graph(config).roles() if is_changing(config, role)]
    if missing := [role for role in wanted if role not in progress.roles]:
        raise TrialError(
            f"algorithm.graph={config.algorithm.graph!r}: the checkpoint (version {progress.version}) has no state of "
            f"role {missing[0]!r}, which changes in this run; it has {', '.join(progress.roles)}: settings, arguments "
            f"or code of the graph have changed; put them back as they were, {ADVICE}"
        )


def missing_history(config: ExperimentConfig, progress: StoredProgress) -> Iterator[str]:
    """Yield a line for each part of a continued trial's history that is damaged or gone; its checkpoint needs none."""
    run_dir, found = run_dir_of(config), list[str]()
    known = progress.held_rows.union(row.get("step") for row in read_rows(run_dir / METRICS_FILE))
    if missing := [step for step in range(1, progress.version + 1) if step not in known]:
        yield (
            f"{METRICS_FILE} lacks {len(missing)} of the {progress.version} steps before the checkpoint, from step "
            f"{missing[0]} on; put a copy of it back to have them"
        )
    entries = read_ledger(run_dir / LEDGER_DIR, lambda location, what: found.append(f"{location}: {what}"))
    if len(entries) < progress.ledger_lines:
        found.insert(
            0,
            f"{LEDGER_DIR}: it has {len(entries)} of the {progress.ledger_lines} lines before checkpoint "
            f"v{progress.version}",
        )
    if found:
        yield (
            f"the ledger is damaged, {found[0]}; training continues from the checkpoint, which does not need it, but "
            "no audit can confirm what the damaged lines recorded; put a copy of the ledger back to have them"
        )
