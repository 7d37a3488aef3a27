"""The run's ledger on disk: how every rollout ended (`asyncrl.comm.ended_rollouts.ledger_lines`, `docs/ledger.md`).

Lines are written by `LedgerFiles`. A line that a kill cut off is removed when the next launch begins. Complete lines
stay, even those of steps later than the checkpoint; the `begin` line says which of them no longer count.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.api.trajectory import GENERATED, OPPONENTS, policy_of
from asyncrl.comm.ended_rollouts.ledger_lines import (
    SEAL_BYTES,
    SEAL_END,
    Begin,
    End,
    LedgerBooks,
    Line,
    Manager,
    PolicyTokens,
    RolloutLine,
    RunSettings,
    Saved,
    SealedLine,
    Step,
    Trained,
)
from asyncrl.comm.names import ACTOR
from asyncrl.comm.typed import json_decoder
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import LEDGER_DIR
from asyncrl.manager.messages import GateBooks
from asyncrl.master.books.ledger_writer import (
    FILE_BYTES,
    LedgerFiles,
    cut_incomplete_step,
    cut_torn_line,
    ledger_files,
    lines_in,
)
from asyncrl.master.data.sample_buffer import TrainBatch
from asyncrl.master.recovery.recorded import Recorded
from asyncrl.trainer.messages import RolloutRecord

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode
_decode = json_decoder(Line).decode
_decode_begin = json_decoder(Begin).decode


class Ledger:
    """Writes the ledger of one launch.

    Args:
        folder: folder of the ledger; created if it is missing.
        settings: settings by which the lines are judged.
        now: seconds since 1970.
        file_bytes: size from which a new file begins.
    """

    def __init__(
        self,
        folder: Path,
        settings: RunSettings,
        *,
        now: Callable[[], float] = time.time,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self.lineage = 0
        self._folder, self._settings, self._now = folder, settings, now
        self._files = LedgerFiles(folder, file_bytes)
        self._lines = 0
        self._unsealed = hashlib.sha256()
        self.recorded = Recorded()
        """The state that all lines add up to, except those that a later launch ruled out."""

    @classmethod
    def of_run(cls, run_dir: Path, config: ExperimentConfig) -> Ledger:
        """Return the ledger of the run in `run_dir`."""
        settings = RunSettings(
            config.train_batch_size,
            config.max_head_offpolicyness,
            str(config.on_stale),
            0 if config.samples.replay else config.rollout.workers,
            config.seed,
            config.dataset.shuffle,
        )
        return cls(run_dir / LEDGER_DIR, settings)

    def begin(self, version: int, state: dict[str, Any] | None, books: GateBooks) -> None:
        """Write the first line of a launch.

        Args:
            version: version from which the launch continues.
            state: what `saved` returned for the checkpoint of that version; None without a checkpoint.
            books: the gate's counters at the start.
        """
        after = 0 if state is None else state["line"]
        known = self._take_up(after) and state is not None
        if not known:
            after, self.recorded = 0, Recorded()
        if version and not known:
            _log.warning(
                "the ledger does not reach to the checkpoint of version %d; the earlier history is lost", version
            )
        self._files.open()
        self._seal(
            Begin(
                lineage=self.lineage,
                version=version,
                after=after,
                settings=self._settings,
                carried=None if known or not version else _plain(books),
                line=self._lines + 1,
                at=self._at(),
                seal="",
            )
        )
        self._files.sync()

    def go_on(self, lines: int) -> bool:
        """Continue the launch after its first `lines` lines; return True if a step is among the lines after these.

        Only an incomplete step is removed, as a checkpoint may name any of the lines.
        """
        has_step = cut_incomplete_step(self._folder, lines)
        if not self._take_up():
            raise ValueError(
                f"the ledger in {self._folder} is damaged; start the run again, it continues from its newest checkpoint"
            )
        self.lineage = max(0, self.lineage - 1)  # the launch continues: no further lineage begins
        self._files.open()
        return has_step

    def lines_written(self) -> int:
        """Sync all lines so far to the disk; return their number."""
        self._files.sync()
        return self._lines

    def begin_manager(self, number: int) -> None:
        """Record that lines about rollouts come from the GserverManager with this number from here on."""
        if number != self.recorded.manager:
            self._add(Manager(number, self._at()))
            self._files.hand_over()

    def take(self, lines: Iterable[RolloutLine]) -> None:
        """Add the manager's lines about rollouts; from now on a new MasterWorker has them too."""
        for line in lines:
            self._add(line)
        self._files.hand_over()

    def step(self, batch: TrainBatch, books: GateBooks | None) -> None:
        """Add the complete step of `batch`; `books` include it, None if the manager did not answer."""
        step = batch.version + 1
        for record in batch.records:
            samples, rewards = len(record.rewards), record.episode_rewards
            reward = sum(rewards) / len(rewards)
            head = (record.rollout_id, record.prompt_id, record.order, self.lineage, step)
            of_policies = _opponents(record.metrics), _policies(record)
            self._add(Trained(*head, record.version_tokens, len(rewards), samples, reward, *of_policies))
        line, at, plain = self._lines + 1, self._at(), _plain(books) if books else None
        self._seal(Step(line=line, at=at, lineage=self.lineage, step=step, books=plain, seal=""))
        self._files.begin_sync()

    def saved(self, version: int, books: GateBooks | None) -> dict[str, Any]:
        """Record that a checkpoint of `version` is about to be written; return the ledger's part of it."""
        line, at, plain = self._lines + 1, self._at(), _plain(books) if books else None
        self._seal(Saved(line=line, at=at, lineage=self.lineage, version=version, books=plain, seal=""))
        self._files.sync()
        return {"line": self._lines, "lineage": self.lineage}

    def end(self, version: int, books: GateBooks) -> None:
        """Write the last line: the launch ends by itself."""
        line, at = self._lines + 1, self._at()
        self._seal(End(line=line, at=at, lineage=self.lineage, version=version, books=_plain(books), seal=""))
        self._files.sync()

    def close(self) -> None:
        """Write the remaining lines."""
        self._files.close()

    def _at(self) -> float:
        return round(self._now(), 3)

    def _add(self, line: Manager | RolloutLine | Trained) -> None:
        encoded = _encode(line) + b"\n"
        self._lines += 1
        self._unsealed.update(encoded)
        self._files.append(encoded)
        self.recorded.take(line)

    def _seal(self, line: SealedLine) -> None:
        """Write `line`, whose seal is still empty, and start the hash for the next seal."""
        open_line = _encode(line)[: -len(b'"}')]
        self._unsealed.update(open_line)
        seal = self._unsealed.hexdigest().encode()
        self._lines += 1
        self.recorded.take(line)
        self._files.append(open_line + seal + SEAL_END)
        self._unsealed = hashlib.sha256(seal)
        self._files.next_if_full()

    def _take_up(self, to: int | None = None) -> bool:
        """Continue after the existing lines: repair the end, count them, hash those after the last seal, add up the
        valid ones.

        Args:
            to: number of lines that count for this launch; None: all, as it continues them.

        Returns:
            False if the ledger has fewer lines, or cannot be read.
        """
        if not ledger_files(self._folder):
            return not to
        cut_torn_line(self._folder)
        begins: list[tuple[int, int]] = []
        for line in lines_in(self._folder):
            self._lines += 1
            if not line.endswith(SEAL_END):  # nothing but a seal is a string at the end of a line
                self._unsealed.update(line)
                continue
            if line.startswith(b'{"kind":"begin"'):
                self.lineage += 1
                begins.append((self._lines, _after(line)))
            self._unsealed = hashlib.sha256(line[-SEAL_BYTES - len(SEAL_END) : -len(SEAL_END)])
        end = self._lines if to is None else to
        return end <= self._lines and self._add_up(_surviving(begins, end))

    def _add_up(self, ranges: Sequence[range]) -> bool:
        """Add the lines in these `ranges` of numbers to `recorded`; return False if one cannot be read."""
        lines, number = lines_in(self._folder), 0
        for surviving in ranges:
            for line in islice(lines, surviving.start - 1 - number, surviving.stop - 1 - number):
                try:
                    self.recorded.take(_decode(line))
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    _log.warning("a line of the ledger in %s is damaged: %s", self._folder, error)
                    return False
            number = surviving.stop - 1
        return True


def _after(begin: bytes) -> int:
    """Return the line after which a launch continues; 0, so that no earlier line counts, if that cannot be read."""
    try:
        return _decode_begin(begin).after
    except msgspec.MsgspecError:
        return 0


def _surviving(begins: Sequence[tuple[int, int]], end: int) -> list[range]:
    """Return the numbers of the lines up to `end` that no later launch ruled out, ascending.

    Args:
        begins: by launch, the number of its first line and of the line after which it continues.
    """
    ranges: list[range] = []
    for number, after in reversed(begins):
        if number <= end:
            ranges.append(range(number, end + 1))
            end = after
    return ranges[::-1]


def _opponents(metrics: Mapping[str, float]) -> dict[str, tuple[int, int]]:
    """Return the oldest and newest version of each policy that answered in a rollout with these metrics."""
    versions: dict[str, dict[str, int]] = {}
    for name, number in metrics.items():
        if name.startswith(OPPONENTS):
            policy, _, which = name.removeprefix(OPPONENTS).partition("/")
            versions.setdefault(policy, {})[which] = int(number)
    return {policy: (each["oldest_version"], each["newest_version"]) for policy, each in versions.items()}


def _policies(record: RolloutRecord) -> dict[str, PolicyTokens]:
    """Return the share of each trained policy in a rollout, from what its worker and the trainer counted."""
    generated = {name.removeprefix(GENERATED): n for name, n in record.metrics.items() if name.startswith(GENERATED)}
    of_sample = [policy_of(group, generated) or ACTOR for group in record.groups or [""] * len(record.generated)]
    trained, samples = Counter[str](), Counter(of_sample)
    for policy, tokens in zip(of_sample, record.generated, strict=True):
        trained[policy] += tokens
    return {name: PolicyTokens(int(each), trained[name], samples[name]) for name, each in generated.items()}


def _plain(books: GateBooks) -> LedgerBooks:
    return LedgerBooks(
        books.submitted,
        books.trained,
        {reason: count for reason, count in books.dropped.items() if count},
        books.abandoned,
        books.running,
        books.finished_untrained,
    )
