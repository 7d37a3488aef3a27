"""The ledger's lines in the files. They must be complete and sealed, and a later lineage may rule out some of them.

A lineage continues after the line of the step whose state it has, from memory or from disk. The lines between no longer
count. The lines that lead to the last line, from lineage to lineage, are the history of the run's present policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.comm.ended_rollouts import SEAL_BYTES, SEAL_END, Begin, End, Line, Step
from asyncrl.comm.typed import json_decoder

_decode = json_decoder(Line).decode

Report = Callable[[str, str], None]
"""Called with the place of a finding and its message."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the ledger, its number over all files (from 1), and its place."""

    number: int
    place: str
    line: Line


def read_ledger(folder: Path, report: Report, note: Report | None = None) -> list[Entry]:
    """Return all lines in the files of `folder`, in order.

    A torn line at the very end, which a kill leaves, is no error. It is left out, and its place is passed to `note`.
    """
    entries: list[Entry] = []
    unsealed = hashlib.sha256()
    files = sorted(folder.glob("*.jsonl"))
    for expected, file in enumerate(files, 1):
        if file.stem != f"{expected:06d}":
            report(f"{folder.name}/{file.name}", f"a file is missing before it: {expected:06d}.jsonl was expected")
        try:
            lines = file.read_bytes().splitlines(keepends=True)
        except OSError as error:
            report(f"{folder.name}/{file.name}", f"it cannot be read: {error.strerror}")
            continue
        for index, raw in enumerate(lines, 1):
            place = f"{folder.name}/{file.name}:{index}"
            if not raw.endswith(b"\n") and file == files[-1]:
                if note is not None:
                    note(place, f"the last line is torn after {len(raw)} bytes; the next launch removes it")
                break
            try:
                line = _decode(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                report(place, f"not a line of a ledger: {error}")
                unsealed.update(raw)
                continue
            entries.append(Entry(len(entries) + 1, place, line))
            if not isinstance(line, Begin | Step | End):
                unsealed.update(raw)
                continue
            unsealed.update(raw[: -SEAL_BYTES - len(SEAL_END)])
            if not raw.endswith(line.seal.encode() + SEAL_END) or line.seal != unsealed.hexdigest():
                report(place, "the seal does not match the lines since the previous seal: a line was changed")
            if line.line != len(entries):
                report(place, f"is numbered {line.line}, but is line {len(entries)}")
            unsealed = hashlib.sha256(line.seal.encode())
    return entries


def surviving(entries: Sequence[Entry], report: Report) -> Iterator[Entry]:
    """Yield the lines that lead to the last line; check that each lineage begins at an allowed place."""
    begins: list[Entry] = []
    for entry in entries:
        line = entry.line
        if isinstance(line, Begin):
            if line.lineage != len(begins):
                report(entry.place, f"begins lineage {line.lineage}, expected {len(begins)}")
            _check_begin(entry, line, entries, begins, report)
            begins.append(entry)
        elif entry.number == 1:
            report(entry.place, "the first line does not begin a launch")
    yield from leading_to(entries, len(entries))


def leading_to(entries: Sequence[Entry], number: int) -> list[Entry]:
    """Return the lines that lead to line `number`: those of its lineage, those of the lineage that this one continues,
    up to the line after which it continues, and so on.
    """
    parts: list[Sequence[Entry]] = []
    for entry in reversed(entries[:number]):
        if isinstance(entry.line, Begin) and entry.number <= number:
            parts.append(entries[entry.number - 1 : number])
            number = max(0, min(entry.line.after, entry.number - 1))
    parts.append(entries[:number])  # empty, unless the first line is missing
    return [entry for part in reversed(parts) for entry in part]


def is_ruled_out(entry: Entry, later: Iterable[Entry]) -> bool:
    """True if a `begin` line among `later` ruled the line out for good."""
    return any(isinstance(each.line, Begin) and each.line.after < entry.number < each.number for each in later)


def _check_begin(entry: Entry, begin: Begin, entries: Sequence[Entry], begins: Iterable[Entry], report: Report) -> None:
    """Check that a lineage begins at version 0, after a step's line, or with counts carried from elsewhere."""
    place, after = entry.place, begin.after
    if begin.carried is not None:
        report(place, f"lineage {begin.lineage} begins at version {begin.version} without the ledger of earlier steps")
        return
    if not after:
        if begin.version:
            report(place, f"begins at version {begin.version} without a checkpoint")
        return
    if not 0 < after < entry.number:
        report(place, f"continues after line {after}, which does not exist")
        return
    origin = entries[after - 1]
    if not isinstance(origin.line, Step):
        report(place, f"continues after line {after} ({origin.place}), which is not the end of a step")
    elif is_ruled_out(origin, begins):
        report(place, f"continues after line {after} ({origin.place}), which was ruled out")
    elif origin.line.step != begin.version:
        report(place, f"begins at version {begin.version} after step {origin.line.step} ({origin.place})")
