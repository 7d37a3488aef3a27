"""The surviving history of a ledger, replayed line by line, with the rules that every run must keep.

- Exactly once: no prompt of an epoch is trained twice, or after it was dropped for good; a rollout has one end.
- Books: at every line that has them, the gate's counters are the totals of the lines; at the end nothing is left over.
- Ages: the step from version v to v + 1 trains no token older than v - max_head_offpolicyness (under `on_stale=mask`:
  none but such tokens), none of a version that did not exist, and none older than the rollout's admission.
- Times: each process's clock goes forward, or is set back for good (`clocks`).
- Order: steps are numbered without a gap and have train_batch_size rollouts each, in the data order; a prompt's id is
  the one that the seed gives its place in the data order; no prompt was passed over (`data_order`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.comm.ended_rollouts.ledger_lines import (
    Abandoned,
    Admitted,
    Begin,
    Dropped,
    End,
    Finished,
    LedgerBooks,
    Line,
    Manager,
    PromptGoes,
    RunSettings,
    Saved,
    Step,
    Trained,
)
from asyncrl.plugins.datasets.queue.order import epoch_of
from asyncrl.verify.audit.clocks import Clock
from asyncrl.verify.audit.data_order import DataOrder
from asyncrl.verify.audit.ledger_files import Entry, Report
from asyncrl.verify.audit.outcome import Outcome, SavedLine, StepTotals
from asyncrl.verify.audit.policies import add_policies, wrong_opponents, wrong_policies

_RUNNING, _FINISHED, _TRAINED, _ABANDONED = "running", "finished", "trained", "abandoned"
_LOST_WORKER, _LOST_WITH_MANAGER = "worker_died", "lost_with_manager"
_LOST = (_LOST_WORKER, _LOST_WITH_MANAGER)
"""Reasons after which the trainer may still receive the rollout, and train or drop it."""
_STALE, _DUPLICATE = "stale", "duplicate_prompt"


@dataclass(slots=True)
class _Rollout:
    prompt: str
    order: int
    version: int
    place: str
    attempt: int = 0
    fate: str = _RUNNING
    reason: str = ""
    step: int = -1
    tokens: int | None = None
    late: bool = False
    """True if it was trained while the gate could not be asked, so that lines about the rollout may follow."""


class Replay:
    """Checks a ledger line by line.

    Args:
        rows: number of rows of the training data; None if unknown, so that prompt ids cannot be checked.
        report: called with each finding.
        note: called with events of the run that are not errors in its files.
    """

    def __init__(self, rows: int | None, report: Report, note: Report = lambda place, what: None) -> None:
        self.outcome = Outcome()
        self._report_to, self._note_to = report, note
        self._manager_clock, self._master_clock = Clock("GserverManager"), Clock("MasterWorker")
        self._place = ""
        self._data_order = DataOrder(rows, self._report)
        self._rollouts: dict[str, _Rollout] = {}
        self._prompts: dict[str, str] = {}  # trained, or dropped for good: by prompt where that is written
        self._put_off: set[str] = set()  # prompts whose next attempt is to come after the rest of their epoch
        self._attempts: Counter[str] = Counter()  # rollouts of a prompt
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._submitted = 0
        self._settings: RunSettings | None = None
        self._lineage = 0
        self._batch: list[_Rollout] = []
        self._unseen = 0
        self._totals = StepTotals()

    def run(self, entries: Iterable[Entry]) -> Outcome:
        """Replay `entries`."""
        for entry in entries:
            self._place = entry.place
            self._take(entry.line)
            if isinstance(entry.line, Saved):
                self.outcome.saved[entry.number] = SavedLine(entry.line, len(self.outcome.used))
        self._check_data_order()
        for clock in (self._manager_clock, self._master_clock):
            clock.check(self._report_to, self._note_to)
        if self._batch and self.outcome.ended:
            self._report(f"{len(self._batch)} trained rollouts belong to no complete step")
        outcome = self.outcome
        outcome.trained, outcome.dropped = self._counts[_TRAINED], +self._dropped
        outcome.abandoned, outcome.live = self._counts[_ABANDONED], self._live
        outcome.submitted, outcome.settings = self._submitted, self._settings
        outcome.tokens = {key: known.tokens for key, known in self._rollouts.items() if known.tokens is not None}
        return outcome

    @property
    def _live(self) -> int:
        return self._counts[_RUNNING] + self._counts[_FINISHED]

    def _report(self, what: str) -> None:
        self._report_to(self._place, what)

    def _take(self, line: Line) -> None:
        if not isinstance(line, Trained):
            clock = (
                self._master_clock if isinstance(line, Begin | Manager | Step | Saved | End) else self._manager_clock
            )
            clock.told(self._place, line.at)
        match line:
            case Begin():
                self._begin(line)
            case Admitted():
                self._admit(line)
            case Finished():
                self._finish(line)
            case Dropped():
                self._drop(line)
            case Abandoned():
                self._abandon(line)
            case Trained():
                self._train(line)
            case Step():
                self._step(line)
            case Saved():
                self._check_lineage(line.lineage)
                if line.version != self.outcome.version:
                    self._report(f"checkpoint of version {line.version} after step {self.outcome.version}")
                self._check_books(line.books)
            case End():
                self._end(line)

    def _begin(self, line: Begin) -> None:
        self._check_data_order()
        for rollout_id in [key for key, known in self._rollouts.items() if known.fate in (_RUNNING, _FINISHED)]:
            self._set_fate(self._rollouts.pop(rollout_id), None)
            self.outcome.lost += 1
        self.outcome.lineages += 1
        self.outcome.ended, self.outcome.steps_of_launch = False, 0
        self.outcome.begun.append(line.version)
        self.outcome.resumed |= line.after > 0
        self._settings, self._lineage = line.settings, line.lineage
        if line.settings.seed < 0 or line.settings.workers < 0:
            self._report(f"seed is {line.settings.seed} and workers {line.settings.workers}, which there are not")
        if line.settings.on_stale not in ("drop", "mask", "wait"):
            self._report(f"on_stale is {line.settings.on_stale!r}, which there is not")
        if line.carried is not None:
            self._dropped = Counter(line.carried.dropped)
            self.outcome.whole = False
        # The gate counts train_batch_size per version, whatever it was when they were trained.
        self._counts[_TRAINED] = line.version * line.settings.train_batch_size
        self._submitted = self._counts[_TRAINED] + self._dropped.total()
        self.outcome.version = line.version
        self._data_order.begin(line.settings, line.lineage, [*self._prompts, *self._put_off])
        self._batch, self._totals = [], StepTotals()

    def _admit(self, line: Admitted) -> None:
        before = self._rollouts.get(line.rollout)
        if before is not None and not before.late:
            self._report(f"rollout {line.rollout} was admitted before, at {before.place}")
            return
        self._data_order.check_prompt(line.prompt, line.order)
        if not 0 <= line.version <= self.outcome.version + 1:  # it may be told after the next step was trained
            self._report(
                f"rollout {line.rollout} was admitted at version {line.version}, after step {self.outcome.version}"
            )
        if line.adopted:  # what was before it may have died with a manager
            self._attempts[line.prompt] = max(self._attempts[line.prompt], line.attempt)
        before_it = self._attempts[line.prompt]
        if not 0 <= line.attempt <= before_it:
            self._report(f"rollout {line.rollout} is attempt {line.attempt} at a prompt that had {before_it} before")
        self._attempts[line.prompt] += 1
        self._put_off.discard(line.prompt)
        self._data_order.admit(line)
        self._submitted += 1
        self.outcome.admitted |= bool(self._settings and self._settings.workers)
        if before is not None:
            self._unseen -= 1
            return
        known = _Rollout(line.prompt, line.order, line.version, self._place, line.attempt, fate="")
        self._rollouts[line.rollout] = known
        self._set_fate(known, _RUNNING)

    def _finish(self, line: Finished) -> None:
        known = self._known(line.rollout)
        if known is None:
            return
        recalled = known.fate == "dropped" and known.reason in _LOST
        if known.late:
            return
        if known.fate != _RUNNING and not recalled:
            self._report(f"rollout {line.rollout} finished and was {known.fate} before")
            return
        if line.tokens <= 0:
            self._report(f"rollout {line.rollout} finished with {line.tokens} tokens")
        known.tokens = line.tokens
        self._set_fate(known, _FINISHED)

    def _drop(self, line: Dropped) -> None:
        known = self._ending(line.rollout, "dropped")
        if known is None:
            return
        if known.reason in _LOST and (line.prompt is not PromptGoes.used or line.reason in _LOST):
            self._report(f"rollout {line.rollout} was lost, and then dropped for {line.reason!r} with its prompt")
        allowed: dict[str, tuple[PromptGoes, ...]] = {
            _LOST_WORKER: (PromptGoes.returned, PromptGoes.used),
            _LOST_WITH_MANAGER: (PromptGoes.returned, PromptGoes.used),
            _STALE: (PromptGoes.returned, PromptGoes.used),
            _DUPLICATE: (PromptGoes.returned, PromptGoes.used),
        }
        if line.prompt not in allowed.get(line.reason, tuple(PromptGoes)) or not line.reason:
            self._report(
                f"rollout {line.rollout} was dropped for {line.reason!r} and its prompt {line.prompt}: no such drop"
            )
        if line.attempt is not None and (
            line.prompt is not PromptGoes.returned or not 0 <= line.attempt - known.attempt <= 1
        ):
            self._report(
                f"rollout {line.rollout} was attempt {known.attempt}, and its prompt ({line.prompt}) is to be "
                f"tried again as attempt {line.attempt}"
            )
        self._set_fate(known, "dropped", line.reason)
        if line.prompt is PromptGoes.returned and line.attempt:
            self._put_off.add(known.prompt)
        if line.prompt is PromptGoes.given_up:
            self._use(known.prompt, known.order, "dropped for good")

    def _ending(self, rollout_id: str, how: str) -> _Rollout | None:
        """Return the rollout that ends now, as `how` says; None if it is unknown or has ended before."""
        known = self._known(rollout_id)
        if known is None or known.late:
            return None
        received = how == "dropped" and known.fate == "dropped" and known.reason in _LOST
        if known.fate not in (_RUNNING, _FINISHED) and not received:
            self._report(f"rollout {rollout_id} was {how} and {known.fate} before: it has two ends")
            return None
        return known

    def _abandon(self, line: Abandoned) -> None:
        known = self._ending(line.rollout, "abandoned")
        if known is None:
            return
        self._set_fate(known, _ABANDONED)

    def _train(self, line: Trained) -> None:
        known = self._rollouts.get(line.rollout)
        self._data_order.check_prompt(line.prompt, line.order)
        if known is None:  # the gate told nothing of it, which is right only if it could not be asked
            self._unseen += 1
            known = _Rollout(line.prompt, line.order, 0, self._place, fate="", late=True)
            self._rollouts[line.rollout] = known
        elif known.fate == _TRAINED:
            self._report(f"rollout {line.rollout} was trained before")
            return
        if (line.prompt, line.order) != (known.prompt, known.order):
            self._report(
                f"rollout {line.rollout} is of prompt {line.prompt} (order {line.order}), and was admitted "
                f"({known.place}) for {known.prompt} (order {known.order})"
            )
        self._check_lineage(line.lineage)
        self._check_ages(line, known)
        for wrong in (*wrong_opponents(line), *wrong_policies(line)):
            self._report(wrong)
        self._set_fate(known, _TRAINED)
        self._use(line.prompt, line.order, f"trained at step {line.step}")
        known.step = line.step
        self._batch.append(known)
        self.outcome.rollouts[line.rollout] = line
        totals = self._totals
        totals.samples += line.samples
        totals.tokens += sum(line.versions.values())
        totals.episodes += line.episodes
        totals.reward += line.reward * line.episodes
        add_policies(line, totals)
        totals.newest_epoch = max(totals.newest_epoch, epoch_of(line.prompt))
        for version, count in line.versions.items():
            if self._settings and 0 <= (age := line.step - 1 - version) <= self._settings.max_head_offpolicyness:
                totals.ages += age * count
                totals.young_tokens += count
                totals.oldest_age = max(totals.oldest_age, age)
        if known.tokens is None or totals.whole_tokens is None:
            totals.whole_tokens = None
        else:
            totals.whole_tokens += known.tokens

    def _check_ages(self, line: Trained, known: _Rollout) -> None:
        name = f"rollout {line.rollout}"
        if not 1 <= line.episodes <= line.samples or any(count < 1 for count in line.versions.values()):
            self._report(f"{name} has {line.samples} samples and the tokens {line.versions}")
        if not line.versions or self._settings is None:
            return
        oldest, newest = min(line.versions), max(line.versions)
        if oldest < known.version:
            self._report(f"{name} has tokens of version {oldest}, and was admitted at version {known.version}")
        if newest >= line.step:
            self._report(f"{name} has tokens of version {newest}, and was trained at step {line.step}")
        decisive = newest if self._settings.on_stale == "mask" else oldest
        eta = self._settings.max_head_offpolicyness
        if (age := line.step - 1 - decisive) > eta:
            self._report(f"{name} was trained at the age of {age} versions; max_head_offpolicyness={eta}")

    def _step(self, line: Step) -> None:
        self._check_lineage(line.lineage)
        if line.step != self.outcome.version + 1:
            self._report(f"step {line.step} after step {self.outcome.version}")
        if self._settings is not None and len(self._batch) != (wanted := self._settings.train_batch_size):
            self._report(f"step {line.step} trained {len(self._batch)} rollouts; train_batch_size={wanted}")
        if stray := sum(known.step != line.step for known in self._batch):
            self._report(f"{stray} of the rollouts before step {line.step} say they were trained at another step")
        orders = [known.order for known in self._batch]
        if orders != sorted(orders):
            self._report(f"the rollouts of step {line.step} are not in the data order")
        for known in self._batch if line.books is None else ():
            known.late = True
        self.outcome.version = line.step
        self.outcome.steps[line.step], self.outcome.books_at[line.step] = self._totals, line.books
        self.outcome.steps_of_launch += 1
        self._batch, self._totals = [], StepTotals()
        self._check_books(line.books)

    def _end(self, line: End) -> None:
        self._check_lineage(line.lineage)
        if line.version != self.outcome.version:
            self._report(f"the launch ended at version {line.version}, after step {self.outcome.version}")
        self._check_books(line.books)
        if self._live:
            self._report(f"the launch ended and nothing says what became of {self._live} rollouts")
        self.outcome.ended = True

    def _check_books(self, books: LedgerBooks | None) -> None:
        if books is None:
            return
        if self._unseen:
            self._report(f"the gate was asked, and yet {self._unseen} rollouts were trained that it never admitted")
            self._unseen = 0
        added = {
            "submitted": self._submitted,
            "trained": self._counts[_TRAINED],
            "dropped": dict(+self._dropped),
            "abandoned": self._counts[_ABANDONED],
            "running": self._counts[_RUNNING],
            "finished_untrained": self._counts[_FINISHED],
        }
        for name, value in added.items():
            if (told := getattr(books, name)) != value:
                self._report(f"the books have {name} {told}, the lines add up to {value}")

    def _use(self, prompt: str, order: int, how: str) -> None:
        if prompt in self._prompts:
            self._report(f"prompt {prompt} is {how}, and was {self._prompts[prompt]}")
            return
        self._prompts[prompt] = f"{how} ({self._place})"
        self.outcome.used.append(prompt)

    def _check_lineage(self, lineage: int) -> None:
        if lineage != self._lineage:
            self._report(f"lineage {lineage}, in the midst of lineage {self._lineage}")

    def _check_data_order(self) -> None:
        if self.outcome.whole:
            self._data_order.check_none_passed_over()

    def _known(self, rollout_id: str) -> _Rollout | None:
        known = self._rollouts.get(rollout_id)
        if known is None:
            self._report(f"rollout {rollout_id} was never admitted")
        return known

    def _set_fate(self, known: _Rollout, fate: str | None, reason: str = "") -> None:
        if known.fate == "dropped":
            self._dropped[known.reason] -= 1
        elif known.fate:
            self._counts[known.fate] -= 1
        known.fate, known.reason = fate or "", reason
        if fate == "dropped":
            self._dropped[reason] += 1
        elif fate:
            self._counts[fate] += 1
