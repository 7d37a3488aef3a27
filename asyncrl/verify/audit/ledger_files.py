"""The ledger's lines in the files, and what they come to. They must be complete and sealed, and a later lineage may
rule out some of them.

A lineage continues after the line of the step whose state it has, from memory or from disk. The lines between no longer
count. The lines that lead to the last line, from lineage to lineage, are the history of the run's present policy.
`Outcome` has its totals, with which the run's other files are compared.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asyncrl.comm.ended_rollouts import (
    SEAL_BYTES,
    SEAL_END,
    Begin,
    End,
    Line,
    RolloutCounts,
    RunSettings,
    Step,
    Trained,
)
from asyncrl.comm.typed import json_decoder
from asyncrl.data.prompt_queue import epoch_of

_decode = json_decoder(Line).decode

Report = Callable[[str, str], None]
"""Called with the place of a finding and its message."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the ledger, its number over all files (from 1), and its place."""

    number: int
    location: str
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
            location = f"{folder.name}/{file.name}:{index}"
            if not raw.endswith(b"\n") and file == files[-1]:
                if note is not None:
                    note(location, f"the last line is torn after {len(raw)} bytes; the next launch removes it")
                break
            try:
                line = _decode(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                report(location, f"not a line of a ledger: {error}")
                unsealed.update(raw)
                continue
            entries.append(Entry(len(entries) + 1, location, line))
            if not isinstance(line, Begin | Step | End):
                unsealed.update(raw)
                continue
            unsealed.update(raw[: -SEAL_BYTES - len(SEAL_END)])
            if not raw.endswith(line.seal.encode() + SEAL_END) or line.seal != unsealed.hexdigest():
                report(location, "the seal does not match the lines since the previous seal: a line was changed")
            if line.line != len(entries):
                report(location, f"is numbered {line.line}, but is line {len(entries)}")
            unsealed = hashlib.sha256(line.seal.encode())
    return entries


def surviving(entries: Sequence[Entry], report: Report) -> Iterator[Entry]:
    """Yield the lines that lead to the last line; check that each lineage begins at an allowed place."""
    begins: list[Entry] = []
    for entry in entries:
        line = entry.line
        if isinstance(line, Begin):
            if line.lineage != len(begins):
                report(entry.location, f"begins lineage {line.lineage}, expected {len(begins)}")
            _check_begin(entry, line, entries, begins, report)
            begins.append(entry)
        elif entry.number == 1:
            report(entry.location, "the first line does not begin a launch")
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
    location, after = entry.location, begin.after
    if begin.carried is not None:
        report(
            location, f"lineage {begin.lineage} begins at version {begin.version} without the ledger of earlier steps"
        )
        return
    if not after:
        if begin.version:
            report(location, f"begins at version {begin.version} without a checkpoint")
        return
    if not 0 < after < entry.number:
        report(location, f"continues after line {after}, which does not exist")
        return
    origin = entries[after - 1]
    if not isinstance(origin.line, Step):
        report(location, f"continues after line {after} ({origin.location}), which is not the end of a step")
    elif is_ruled_out(origin, begins):
        report(location, f"continues after line {after} ({origin.location}), which was ruled out")
    elif origin.line.step != begin.version:
        report(location, f"begins at version {begin.version} after step {origin.line.step} ({origin.location})")


@dataclass(slots=True)
class StepTotals:
    """Sums over the trained lines of a step."""

    samples: int = 0
    episodes: int = 0
    tokens: int = 0
    reward: float = 0.0
    """Sum over episodes."""
    ages: float = 0.0
    """Sum over the tokens within max_head_offpolicyness, of which there are `young_tokens`."""
    young_tokens: int = 0
    oldest_age: int = 0
    newest_epoch: int = 0
    policy_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of the samples of each trained policy, if there are several."""
    whole_tokens: int | None = 0
    """Tokens including those of prompts and environments; None if a rollout has no line that it is finished."""

    def add(self, line: Trained, whole_tokens: int | None, eta: int | None) -> None:
        """Add a trained line.

        Args:
            whole_tokens: all tokens of the rollout; None if it has no line that it is finished.
            eta: max_head_offpolicyness; None if unknown.
        """
        self.samples += line.samples
        self.tokens += sum(line.versions.values())
        self.episodes += line.episodes
        self.reward += line.reward * line.episodes
        for policy, share in line.policies.items():
            self.policy_tokens[policy] += share.trained
        self.newest_epoch = max(self.newest_epoch, epoch_of(line.prompt))
        for version, count in line.versions.items():
            if eta is not None and 0 <= (age := line.step - 1 - version) <= eta:
                self.ages += age * count
                self.young_tokens += count
                self.oldest_age = max(self.oldest_age, age)
        if whole_tokens is None or self.whole_tokens is None:
            self.whole_tokens = None
        else:
            self.whole_tokens += whole_tokens


@dataclass(slots=True)
class Outcome:
    """Result of replaying the history."""

    version: int = 0
    """The last step."""
    ended: bool = False
    """True if the last launch ended by itself."""
    summed_up: bool = False
    """True if the last launch left a summary, which is written after the end of the ledger."""
    submitted: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    abandoned: int = 0
    live: int = 0
    lost: int = 0
    """Number of rollouts that were live when a launch ended without an `end` line."""
    lineages: int = 0
    settings: RunSettings | None = None
    steps: dict[int, StepTotals] = field(default_factory=dict)
    used: list[str] = field(default_factory=list)
    """Prompts trained or dropped for good, in that order."""
    rollouts: dict[str, Trained] = field(default_factory=dict)
    """Trained lines by rollout."""
    tokens: dict[str, int] = field(default_factory=dict)
    """All tokens of each finished rollout."""
    counts_at: dict[int, RolloutCounts] = field(default_factory=dict)
    """By step, the rollout counts in its line."""
    begun: int = 0
    """The version at which the last lineage began."""
    steps_of_launch: int = 0
    """Steps of the last launch."""
    admitted: bool = False
    """True if a rollout was admitted to a worker, not read from kept samples."""
    whole: bool = True
    """True if the ledger has the run's whole history."""

    @property
    def is_over(self) -> bool:
        """True if the last launch ended by itself, according to the ledger or, if that is cut off, to the summary."""
        return self.ended or self.summed_up
