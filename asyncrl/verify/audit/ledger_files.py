"""The ledger's lines in the files. They must be complete and sealed, and a later launch may rule out some of them.

A launch continues after the line that its checkpoint names. The lines between are ruled out, even if one of them ruled
out others. The remaining lines are the history of the run's present policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.comm.ended_rollouts.ledger_lines import SEAL_BYTES, SEAL_END, Begin, End, Line, Saved, Step
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
            if not isinstance(line, Begin | Step | Saved | End):
                unsealed.update(raw)
                continue
            unsealed.update(raw[: -SEAL_BYTES - len(SEAL_END)])
            if not raw.endswith(line.seal.encode() + SEAL_END) or line.seal != unsealed.hexdigest():
                report(place, "the seal does not match the lines since the previous seal: a line was changed")
            if line.line != len(entries):
                report(place, f"is numbered {line.line}, but is line {len(entries)}")
            unsealed = hashlib.sha256(line.seal.encode())
    return entries


def surviving(entries: list[Entry], report: Report) -> Iterator[Entry]:
    """Yield the lines that no later launch ruled out; check that each launch continues at an allowed place."""
    kept: list[Entry] = []
    lineage = -1
    for entry in entries:
        line = entry.line
        if isinstance(line, Begin):
            lineage += 1
            if line.lineage != lineage:
                report(entry.place, f"begins lineage {line.lineage}, expected {lineage}")
            while kept and kept[-1].number > line.after:
                kept.pop()
            _check_begin(entry.place, line, kept[-1] if kept else None, report)
        elif not kept and entry.number == 1:
            report(entry.place, "the first line does not begin a launch")
        kept.append(entry)
    yield from kept


def _check_begin(place: str, begin: Begin, from_entry: Entry | None, report: Report) -> None:
    """Check that a launch begins at version 0, after a checkpoint's line, or with counts carried from elsewhere."""
    if begin.carried is not None:
        report(place, f"lineage {begin.lineage} begins at version {begin.version} without the ledger of earlier steps")
        return
    if not begin.after:
        if begin.version:
            report(place, f"begins at version {begin.version} without a checkpoint")
        return
    if from_entry is None or from_entry.number != begin.after:
        report(place, f"continues after line {begin.after}, which was ruled out or does not exist")
    elif not isinstance(from_entry.line, Saved):
        report(place, f"continues after line {begin.after} ({from_entry.place}), which is not a line of a checkpoint")
    elif from_entry.line.version != begin.version:
        saved = from_entry.line.version
        report(place, f"begins at version {begin.version} from the checkpoint of version {saved} ({from_entry.place})")
