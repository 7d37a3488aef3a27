"""The folders of checkpoints and weights, compared with their manifests and with the ledger's history."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.comm.ended_rollouts.ledger_lines import Admitted, Begin, Dropped, End, PromptGoes, Step, Trained
from asyncrl.comm.typed import convert
from asyncrl.config.run_dir import CHECKPOINT_STATE_FILE as STATE_FILE
from asyncrl.models.weights.versions.manifest import MANIFEST_FILE, FileEntry, TensorEntry, checksum
from asyncrl.verify.audit.documents import MAX_ROWS, Settings, one_line
from asyncrl.verify.audit.ledger_files import Entry, Report, is_ruled_out, leading_to
from asyncrl.verify.audit.outcome import Outcome

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


class MasterState(msgspec.Struct, frozen=True):
    """The checked part of the MasterWorker's state in a checkpoint."""

    version: int
    gate: Gate


class CheckpointState(msgspec.Struct, frozen=True):
    """`state.json` of a checkpoint."""

    version: int
    master_state: MasterState


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
    place = "/".join(folder.parts[-3:] if weights else folder.parts[-2:])
    try:
        manifest = convert(json.loads((folder / MANIFEST_FILE).read_bytes()), Manifest)
    except FileNotFoundError:
        if folder.exists():  # otherwise the run continues and has removed it
            report(place, f"has no {MANIFEST_FILE}")
        return False
    except (OSError, ValueError, RecursionError, msgspec.ValidationError) as error:
        report(place, f"{MANIFEST_FILE} cannot be read: {one_line(error)}")
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
        report(place, what)
    return not wrong


def _check_state(folder: Path, outcome: Outcome, entries: Sequence[Entry], report: Report) -> None:
    place = f"{folder.parent.name}/{folder.name}"
    try:
        state = convert(json.loads((folder / STATE_FILE).read_bytes()), CheckpointState)
        master = state.master_state
        used = master.gate.used.ids()
    except (OSError, ValueError, RecursionError, zlib.error, msgspec.ValidationError) as error:
        report(place, f"{STATE_FILE} cannot be read: {one_line(error)}")
        return
    version = master.version
    if not f"v{version}" == f"v{state.version}" == folder.name:
        report(place, f"is of version {version}, its ranks are of {state.version}")
    if len(used) != master.gate.used.count:
        report(place, f"has {len(used)} used prompts where count says {master.gate.used.count}")
    number = master.gate.line
    entry = entries[number - 1] if 0 < number <= len(entries) else None
    if entry is None or not isinstance(entry.line, Step) or is_ruled_out(entry, entries):
        report(place, f"continues after line {number} of the ledger, which is not a step that counts")
        return
    line = entry.line
    if line.step != version:
        report(place, f"is of version {version}; its line of the ledger is of {line.step}")
    told = {reason: count for reason, count in master.gate.dropped.items() if count}
    if told != line.books.dropped:
        report(place, f"has dropped {told}, its line of the ledger {line.books.dropped}")
    if outcome.whole:
        _check_prompts(place, used, master.gate.retries, leading_to(entries, number), report)


def _check_prompts(
    place: str, used: set[str], retries: Iterable[tuple[int, int, int]], entries: Iterable[Entry], report: Report
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
                if line.prompt is PromptGoes.given_up:
                    recorded.add(began.prompt)
                    tries.pop(began.order, None)
                else:
                    tries[began.order] = line.attempt or 0, line.failures
    if used != recorded:
        report(
            place,
            f"has {len(used)} used prompts and the ledger {len(recorded)}; {len(used ^ recorded)} are in one only, "
            f"for example {min(used ^ recorded)}",
        )
    tried = {(order, *each) for order, each in tries.items() if any(each)}
    if different := {each for each in retries if any(each[1:])} ^ tried:
        report(place, f"has other tries (order, attempt, failures) than the ledger, for example {min(different)}")


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
        there, told = found.get(name), manifest.tensors.get(name)
        if there is None or told is None:
            yield f"tensor {name} is {'in no manifest' if told is None else 'in no file'}"
        elif there != told:
            yield (
                f"tensor {name} is {there.dtype}{[*there.shape]} in {there.file}, its manifest says "
                f"{told.dtype}{[*told.shape]} in {told.file}"
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
