"""Files of a run besides ledger and rows: settings, summary, rollout counts, data record; folders of checkpoints and
weights.

Each small file is read once and checked for its format. One that cannot be read is a finding and counts as missing from
then on. The folders are compared with their manifests and with the ledger's history.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import yaml  # type: ignore[import-untyped]

from asyncrl.comm.ended_rollouts import Admitted, Begin, Dropped, End, PromptFate, Step, Trained
from asyncrl.comm.typed import convert
from asyncrl.config.run_dir import CHECKPOINT_STATE_FILE as STATE_FILE
from asyncrl.config.run_dir import CONFIG_FILE, COUNTS_FILE, DATA_RECORD_FILE, SUMMARY_FILE
from asyncrl.data.datasets import DataRecord
from asyncrl.verify.audit.ledger_files import Entry, Outcome, Report, is_ruled_out, leading_to
from asyncrl.weights.manifest import MANIFEST_FILE, FileEntry, TensorEntry, checksum

MAX_ROWS = 1 << 32
"""Rows in prompt ids are below this."""

_T = TypeVar("_T")


class Rollout(msgspec.Struct, frozen=True):
    """The settings of `rollout` that matter for the ledger."""

    workers: int


class EvaluationSet(msgspec.Struct, frozen=True):
    """An entry of `eval.sets`; without an interval it has that of `eval`."""

    interval: int | None = None


class Evaluation(msgspec.Struct, frozen=True):
    """The settings of `eval` that decide which versions are evaluated."""

    interval: int = 0
    sets: list[EvaluationSet] = []

    def is_due(self, version: int, total_steps: int) -> bool:
        """True if `version` is evaluated on any set."""
        intervals = [self.interval if each.interval is None else each.interval for each in self.sets]
        return any(
            interval > 0 and (version % interval == 0 or version == total_steps)
            for interval in intervals or [self.interval]
        )


class Samples(msgspec.Struct, frozen=True):
    """The settings of `samples`."""

    every: int = 0
    replay: str = ""


class Manager(msgspec.Struct, frozen=True):
    """The settings of `manager` that decide which versions have a folder."""

    weight_transport: str = "disk"


class System(msgspec.Struct, frozen=True):
    """The settings of `system` that decide whether all processes write into the run's folder."""

    shared_filesystem: bool = True


class Settings(msgspec.Struct, frozen=True):
    """The settings in `config.yaml` on which the run's files depend."""

    train_batch_size: int
    max_head_offpolicyness: int
    on_stale: str
    seed: int
    rollout: Rollout
    total_train_steps: int = 0
    total_epochs: float | None = None
    eval: Evaluation = Evaluation()
    samples: Samples = Samples()
    manager: Manager = Manager()
    system: System = System()


class Counts(msgspec.Struct, frozen=True):
    """The gate's counters."""

    submitted: int
    trained: int
    dropped: dict[str, int]
    abandoned: int
    running: int
    finished_untrained: int

    @property
    def accounted_for(self) -> int:
        """Return the number of rollouts in the counters, ended or not."""
        under_way = self.running + self.finished_untrained
        return self.trained + sum(self.dropped.values()) + self.abandoned + under_way


class Summary(msgspec.Struct, frozen=True):
    """`summary.json`."""

    steps: int
    total_steps: int
    counts: Counts = msgspec.field(name="books")
    eval: dict[str, dict[str, Any]]
    evaluations: list[dict[str, Any]]
    evaluations_failed: list[dict[str, Any]]


class LastCounts(msgspec.Struct, frozen=True):
    """`books.json`."""

    step: int
    counts: Counts = msgspec.field(name="books")


@dataclass(frozen=True)
class Documents:
    """The small files of a run; None for one that is missing or cannot be read.

    Attributes:
        there: names of the files in the folder, valid or not.
    """

    there: frozenset[str]
    settings: Settings | None
    summary: Summary | None
    counts: LastCounts | None
    data: DataRecord | None

    @classmethod
    def read(cls, run_dir: Path, report: Report) -> Documents:
        """Read the files in `run_dir`."""
        names = (CONFIG_FILE, SUMMARY_FILE, COUNTS_FILE, DATA_RECORD_FILE)
        there = frozenset(name for name in names if (run_dir / name).exists())

        def read(name: str, kind: type[_T], parse: Callable[[bytes], Any] = json.loads) -> _T | None:
            return read_as(run_dir / name, kind, report, parse) if name in there else None

        data = read(DATA_RECORD_FILE, DataRecord)
        if data is not None and (wrong := _wrong_with_record(data)):
            report(DATA_RECORD_FILE, wrong)
            data = None
        return cls(
            there,
            read(CONFIG_FILE, Settings, yaml.safe_load),
            read(SUMMARY_FILE, Summary),
            read(COUNTS_FILE, LastCounts),
            data,
        )

    def check_there(self, outcome: Outcome, report: Report) -> None:
        """Report the files that a run with this history must have.

        A launch removes the summary and counts of the previous one, so if both are missing a later launch has begun.
        """
        settings, outcome.summed_up = self.settings, SUMMARY_FILE in self.there
        if CONFIG_FILE not in self.there:
            report(CONFIG_FILE, "is not there")
        elsewhere = settings is not None and (bool(settings.samples.replay) or not settings.system.shared_filesystem)
        if DATA_RECORD_FILE not in self.there and outcome.admitted and not elsewhere:
            report(DATA_RECORD_FILE, "is not there")
        if outcome.ended and COUNTS_FILE in self.there and SUMMARY_FILE not in self.there:
            report(SUMMARY_FILE, "is missing, although the run ended by itself according to the ledger")
        if outcome.ended and SUMMARY_FILE in self.there and COUNTS_FILE not in self.there:
            report(COUNTS_FILE, "is not there")
        if SUMMARY_FILE in self.there and not outcome.ended:
            report(SUMMARY_FILE, "exists, but the ledger has no line about the end of the run: the ledger is cut off")

    def check_settings(self, outcome: Outcome, report: Report) -> None:
        """Check that the settings are those of the last launch in the ledger."""
        known, settings = outcome.settings, self.settings
        if known is None or settings is None or COUNTS_FILE not in self.there:
            return
        written = {
            "train_batch_size": settings.train_batch_size,
            "max_head_offpolicyness": settings.max_head_offpolicyness,
            "on_stale": settings.on_stale,
            "workers": settings.rollout.workers if known.workers else 0,  # 0: a replay, which has none
            "seed": settings.seed,
        }
        for name, value in written.items():
            if (stated := getattr(known, name)) != value:
                report(CONFIG_FILE, f"{name} is {value}, the ledger's last launch had {stated}")

    def check_counts(self, outcome: Outcome, report: Report) -> None:
        """Check the rollout counts in `books.json` and those in the summary."""
        if (last := self.counts) is not None:
            if last.counts.submitted != last.counts.accounted_for:
                stated = last.counts.accounted_for
                report(COUNTS_FILE, f"has {last.counts.submitted} submitted rollouts and accounts for {stated}")
            if not 0 <= last.step <= outcome.version + (not outcome.ended):
                report(COUNTS_FILE, f"is of step {last.step}; the ledger's last step is {outcome.version}")
            elif outcome.ended and outcome.steps_of_launch and last.step != outcome.version:
                report(COUNTS_FILE, f"is of step {last.step}; the run ended at {outcome.version}")
            known = outcome.counts_at.get(last.step)
            if known is not None and outcome.ended and outcome.steps_of_launch:
                self._compare(COUNTS_FILE, last.counts, msgspec.structs.asdict(known), report)
        if (summary := self.summary) is None or not outcome.ended:
            return
        if summary.steps != outcome.version:
            report(SUMMARY_FILE, f"has {summary.steps} steps, the ledger {outcome.version}")
        settings = self.settings
        differs = settings is not None and summary.total_steps != settings.total_train_steps
        if settings is not None and differs and not self._is_used_up(settings, summary, outcome):
            report(
                SUMMARY_FILE,
                f"total_steps is {summary.total_steps}, {CONFIG_FILE} has total_train_steps "
                f"{settings.total_train_steps}",
            )
        counted = {
            "submitted": outcome.submitted,
            "trained": outcome.trained,
            "dropped": dict(outcome.dropped),
            "abandoned": outcome.abandoned,
            "running": 0,
            "finished_untrained": 0,
        }
        self._compare(SUMMARY_FILE, summary.counts, counted, report)

    def _is_used_up(self, settings: Settings, summary: Summary, outcome: Outcome) -> bool:
        """True if the run ended before its last step since too few prompts of its epochs were left."""
        if settings.total_epochs is None or summary.total_steps != summary.steps:
            return False
        rows = None if self.data is None else int(settings.total_epochs * self.data.rows)
        return rows is None or rows - len(outcome.used) < settings.train_batch_size

    def _compare(self, location: str, stated: Counts, counted: dict[str, Any], report: Report) -> None:
        for name, value in counted.items():
            has = getattr(stated, name)
            if ({key: count for key, count in has.items() if count} if isinstance(has, dict) else has) != value:
                report(location, f"has {name} {has}, the ledger {value}")


def read_as(file: Path, kind: type[_T], report: Report, parse: Callable[[bytes], Any] = json.loads) -> _T | None:
    """Return the content of `file` as a `kind`. If it is not one, report a finding and return None."""
    try:
        return convert(parse(file.read_bytes()), kind)
    except (OSError, ValueError, RecursionError, yaml.YAMLError, msgspec.ValidationError) as error:
        report(file.name, f"cannot be read: {one_line(error)}")
        return None


def one_line(error: BaseException) -> str:
    """Return the kind of `error` and the first line of its message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.200}"


def _wrong_with_record(data: DataRecord) -> str | None:
    if not 0 < data.rows <= MAX_ROWS:
        return f"has {data.rows} rows"
    if data.line_sums is not None and len(data.line_sums) != -(-data.rows * 4 // 3) * 4:  # base64
        return f"has {data.rows} rows, but checksums of a different number of rows"
    return None


_FORMAT = 2
_CHECKPOINT_ROLE = "checkpoint"
_MAX_HEADER_BYTES = 100 << 20
_MAX_BITMAP_BYTES = MAX_ROWS // 8


class Manifest(msgspec.Struct, frozen=True):
    """`manifest.json` of a folder."""

    format: int
    role: str
    version: int
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]


class UsedPrompts(msgspec.Struct, frozen=True):
    """A checkpoint's used prompts: for each epoch a bitmap of rows, compressed, in base64; and other ids."""

    count: int
    epochs: dict[str, str]
    others: list[str]

    def ids(self) -> set[str]:
        """Return the ids; raises ValueError or zlib.error if they cannot be read."""
        used = set(self.others)
        for epoch, packed in self.epochs.items():
            stream = zlib.decompressobj()
            bitmap = stream.decompress(base64.b64decode(packed, validate=True), _MAX_BITMAP_BYTES)
            if not stream.eof:
                raise ValueError(f"the bitmap of epoch {epoch} is cut off or too long")
            for byte, bits in enumerate(bitmap):
                used.update(f"e{int(epoch)}-{byte * 8 + bit}" for bit in range(8) if bits >> bit & 1)
        return used


class Gate(msgspec.Struct, frozen=True):
    """The checked part of the gate's state in a checkpoint.

    Attributes:
        line: the ledger's line after which it continues.
        retries: order, attempt and failures of prompts that wait, or were live.
    """

    used: UsedPrompts
    line: int
    retries: list[tuple[int, int, int]]
    dropped: dict[str, int] = {}


class HeldRows(msgspec.Struct, frozen=True):
    """Rows of metrics that wait for an evaluation."""

    rows: list[dict[str, Any]] = []


class MasterState(msgspec.Struct, frozen=True):
    """The checked part of the MasterWorker's state in a checkpoint."""

    version: int
    gate: Gate
    metrics_log: HeldRows = HeldRows()


class CheckpointState(msgspec.Struct, frozen=True):
    """`state.json` of a checkpoint."""

    version: int
    master_state: MasterState

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read that of the checkpoint in `folder`; raises OSError, ValueError or RecursionError if it cannot be."""
        try:
            return convert(json.loads((folder / STATE_FILE).read_bytes()), cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error


def versions_in(root: Path) -> list[Path]:
    """Return the folders `v<N>` in `root`, ascending."""
    found = (path for path in root.glob("v*") if path.name[1:].isdecimal() and path.is_dir())
    return sorted(found, key=lambda path: int(path.name[1:]))


def role_folders(weights: Path) -> list[Path]:
    """Return the folders of the roles in `weights`."""
    return sorted(path for path in weights.glob("*") if path.is_dir())


def check_checkpoints(
    root: Path, folders: list[Path], outcome: Outcome, entries: Sequence[Entry], report: Report
) -> None:
    """Check that every checkpoint is complete and has the used prompts that the ledger had by then.

    Args:
        folders: those that existed before the ledger was read.
        entries: all lines of the ledger.
    """
    for folder in folders:
        if check_folder(folder, _CHECKPOINT_ROLE, report):
            _check_state(folder, outcome, entries, report)
    newest = int(folders[-1].name[1:]) if folders else None
    ended = outcome.is_over and outcome.version > 0
    if newest is None and (ended or _was_stopped(entries)):
        report(root.name, "has no checkpoint, and one was written")
    elif newest is not None and newest < outcome.version and ended:
        report(root.name, f"the newest is of version {newest}; the run ended by itself at {outcome.version}")


def _was_stopped(entries: Sequence[Entry]) -> bool:
    """True if the run continues from a state at which a launch had ended by itself: that one is on disk."""
    return any(
        isinstance(before.line, End) and isinstance(each.line, Begin) and each.line.after > 0
        for before, each in pairwise(entries)
        if not is_ruled_out(each, entries)
    )


def check_weights(
    root: Path, folders: Mapping[str, list[Path]], settings: Settings | None, outcome: Outcome, report: Report
) -> None:
    """Check that every published version is complete and was made by a step, and that the newest exists."""
    possible = outcome.version + (not outcome.ended)  # a version is published before the ledger has its step
    newest = 0 if not outcome.version else -1
    for role, versions in sorted(folders.items()):
        for folder in versions:
            check_folder(folder, role, report)
            newest = max(newest, version := int(folder.name[1:]))
            if version > possible:
                report(f"{root.name}/{role}/{folder.name}", f"no step made it; the last was {outcome.version}")
    each_step = settings is not None and settings.manager.weight_transport == "disk" and outcome.steps_of_launch > 0
    if newest < outcome.version and (outcome.is_over or each_step):
        newest_known = f"the newest is of version {newest}" if newest >= 0 else "has no version"
        report(root.name, f"{newest_known}; the ledger's last step made {outcome.version}")


def check_folder(folder: Path, role: str, report: Report) -> bool:
    """Compare the files of `folder` with its manifest: names, sizes, checksums, tensors; return True if all agree."""
    weights = folder.parent.parent.name == "weights"
    location = "/".join(folder.parts[-3:] if weights else folder.parts[-2:])
    try:
        manifest = convert(json.loads((folder / MANIFEST_FILE).read_bytes()), Manifest)
    except FileNotFoundError:
        if folder.exists():  # otherwise the run continues and has removed it
            report(location, f"has no {MANIFEST_FILE}")
        return False
    except (OSError, ValueError, RecursionError, msgspec.ValidationError) as error:
        report(location, f"{MANIFEST_FILE} cannot be read: {one_line(error)}")
        return False
    wrong = []
    if f"v{manifest.version}" != folder.name:
        wrong.append(f"its manifest is of version {manifest.version}")
    if (manifest.format, manifest.role) != (_FORMAT, role):
        wrong.append(f"its manifest is of {manifest.role!r} in format {manifest.format}, not of {role!r} in {_FORMAT}")
    for name, entry in manifest.files.items():
        if name == MANIFEST_FILE or not {"", ".", ".."}.isdisjoint(name.split("/")):
            wrong.append(f"its manifest lists {name!r}, which is not a file of the folder")
        elif (what := _wrong_with(folder / name, name, entry)) is not None:
            wrong.append(what)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    wrong += [f"{name} is not in the manifest" for name in sorted(names - manifest.files.keys() - {MANIFEST_FILE})]
    if not wrong and weights:
        wrong += _wrong_tensors(folder, manifest)
    if wrong and not folder.exists():  # removed while it was read
        return False
    for what in wrong:
        report(location, what)
    return not wrong


def _check_state(folder: Path, outcome: Outcome, entries: Sequence[Entry], report: Report) -> None:
    location = f"{folder.parent.name}/{folder.name}"
    try:
        state = CheckpointState.read(folder)
        master = state.master_state
        used = master.gate.used.ids()
    except (OSError, ValueError, RecursionError, zlib.error) as error:
        report(location, f"{STATE_FILE} cannot be read: {one_line(error)}")
        return
    version = master.version
    if not f"v{version}" == f"v{state.version}" == folder.name:
        report(location, f"is of version {version}, its ranks are of {state.version}")
    if len(used) != master.gate.used.count:
        report(location, f"has {len(used)} used prompts where count says {master.gate.used.count}")
    number = master.gate.line
    entry = entries[number - 1] if 0 < number <= len(entries) else None
    if entry is None or not isinstance(entry.line, Step) or is_ruled_out(entry, entries):
        report(location, f"continues after line {number} of the ledger, which is not a step that counts")
        return
    line = entry.line
    if line.step != version:
        report(location, f"is of version {version}; its line of the ledger is of {line.step}")
    stated = {reason: count for reason, count in master.gate.dropped.items() if count}
    if stated != line.counts.dropped:
        report(location, f"has dropped {stated}, its line of the ledger {line.counts.dropped}")
    if outcome.whole:
        _check_prompts(location, used, master.gate.retries, leading_to(entries, number), report)


def _check_prompts(
    location: str, used: set[str], retries: Iterable[tuple[int, int, int]], entries: Iterable[Entry], report: Report
) -> None:
    """Compare used prompts, and the tries of the others, with the lines that lead to the checkpoint."""
    admitted: dict[str, Admitted] = {}
    recorded: set[str] = set()
    tries: dict[int, tuple[int, int]] = {}
    for line in (entry.line for entry in entries):
        match line:
            case Admitted():
                admitted[line.rollout] = line
                tries[line.order] = line.attempt, line.failures
            case Trained():
                recorded.add(line.prompt)
                tries.pop(line.order, None)
            case Dropped() if (began := admitted.get(line.rollout)) is not None:
                if line.prompt is PromptFate.given_up:
                    recorded.add(began.prompt)
                    tries.pop(began.order, None)
                else:
                    tries[began.order] = line.attempt or 0, line.failures
    if used != recorded:
        report(
            location,
            f"has {len(used)} used prompts and the ledger {len(recorded)}; {len(used ^ recorded)} are in one only, "
            f"for example {min(used ^ recorded)}",
        )
    tried = {(order, *each) for order, each in tries.items() if any(each)}
    if different := {each for each in retries if any(each[1:])} ^ tried:
        report(location, f"has other tries (order, attempt, failures) than the ledger, for example {min(different)}")


def _wrong_with(file: Path, name: str, entry: FileEntry) -> str | None:
    if not file.is_file():
        return f"{name} is missing"
    try:
        if (size := file.stat().st_size) != entry.bytes:
            return f"{name} has {size} bytes, its manifest says {entry.bytes}"
        found = checksum(file)
    except OSError as error:
        return f"{name} cannot be read: {one_line(error)}"
    return None if found == entry.xxh3 else f"{name} has the checksum {found}, its manifest says {entry.xxh3}"


def _wrong_tensors(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Compare the manifest's tensors with the headers of their files; yield the differences."""
    found: dict[str, TensorEntry] = {}
    for name in (name for name in manifest.files if name.endswith(".safetensors")):
        try:
            header = _header(folder / name)
            found |= {tensor: TensorEntry(tuple(each["shape"]), each["dtype"], name) for tensor, each in header.items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            yield f"{name} has no readable header: {one_line(error)}"
    for name in sorted(found.keys() | manifest.tensors.keys()):
        there, stated = found.get(name), manifest.tensors.get(name)
        if there is None or stated is None:
            yield f"tensor {name} is {'in no manifest' if stated is None else 'in no file'}"
        elif there != stated:
            yield (
                f"tensor {name} is {there.dtype}{[*there.shape]} in {there.file}, its manifest says "
                f"{stated.dtype}{[*stated.shape]} in {stated.file}"
            )


def _header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: its length in 8 bytes, then JSON."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        header: dict[str, Any] = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return header
