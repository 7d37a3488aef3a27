"""Replay of the surviving history of a ledger, line by line, with the rules that every run must keep.

- Exactly once: no prompt of an epoch is trained twice, or after it was dropped for good; a prompt has one live rollout
  at most, and none once it is used; a rollout has one end.
- Books: at every line with the gate's counters, they are the totals of the lines; at the end no rollout is left over.
- Ages: the step from version v to v + 1 trains no token older than v - max_head_offpolicyness (under `on_stale=mask`:
  none but such tokens), none of a version that did not exist, and none older than the rollout's admission.
- Times: the writer's clock goes forward, or is set back for good (`clocks`).
- Order: steps are numbered without a gap and have train_batch_size rollouts each, in the data order; a prompt's id is
  the one that the seed gives its place in the data order; no prompt was passed over (`data_order`).
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.comm.ended_rollouts.ledger_lines import (
    Abandoned,
    Admitted,
    Begin,
    Dropped,
    End,
    Finished,
    Line,
    PromptGoes,
    RolloutCounts,
    Step,
    Trained,
)
from asyncrl.verify.audit.attempts import PromptAttempts
from asyncrl.verify.audit.clocks import Clock
from asyncrl.verify.audit.data_order import DataOrder
from asyncrl.verify.audit.ledger_files import Entry, Report
from asyncrl.verify.audit.outcome import Outcome, StepTotals
from asyncrl.verify.audit.policy_checks import wrong_opponents, wrong_policies
from asyncrl.verify.audit.rollouts import (
    ABANDONED,
    DROPPED,
    FINISHED,
    RUNNING,
    TRAINED,
    AuditedRollout,
    Rollouts,
)

_NOBODY = "nobody/0"
"""Worker of an adopted rollout that only the trainer had."""
_PROMPT_STAYS = ("worker_died", "stale")
"""Reasons of drops after which the prompt is tried again, unless it is used."""


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
        self._place = ""
        self._clock = Clock()
        self._data_order = DataOrder(rows, self._report)
        self._prompts = PromptAttempts(self._report)
        self._rollouts = Rollouts()
        self._lineage = 0
        self._lost: set[str] = set()
        self._batch: list[AuditedRollout] = []
        self._totals = StepTotals()

    def run(self, entries: Iterable[Entry]) -> Outcome:
        """Replay `entries`."""
        for entry in entries:
            self._place = entry.place
            self._take(entry.line)
        self._check_data_order()
        self._clock.check(self._report_to, self._note_to)
        if self._batch and self.outcome.ended:
            self._report(f"{len(self._batch)} trained rollouts belong to no complete step")
        outcome, rollouts = self.outcome, self._rollouts
        outcome.trained, outcome.dropped = rollouts.count(TRAINED), +rollouts.dropped
        outcome.abandoned, outcome.live = rollouts.count(ABANDONED), rollouts.live
        outcome.submitted = rollouts.submitted
        outcome.tokens = {key: known.tokens for key, known in rollouts.by_id.items() if known.tokens is not None}
        return outcome

    def _report(self, what: str) -> None:
        self._report_to(self._place, what)

    def _take(self, line: Line) -> None:
        self._clock.told(self._place, line)
        if self.outcome.ended and not isinstance(line, Begin):
            self._report("a line after the end of its lineage")
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
            case End():
                self._end(line)

    def _begin(self, line: Begin) -> None:
        self._check_data_order()
        self._lost = self._rollouts.begin(line)
        self.outcome.lost += len(self._lost)
        self.outcome.lineages += 1
        self.outcome.ended, self.outcome.steps_of_launch = False, 0
        self.outcome.begun = line.version
        self.outcome.settings, self._lineage = line.settings, line.lineage
        if line.settings.seed < 0 or line.settings.workers < 0:
            self._report(
                f"seed is {line.settings.seed} and workers {line.settings.workers}; negative numbers are not valid"
            )
        if line.settings.on_stale not in ("drop", "mask", "wait"):
            self._report(f"on_stale is {line.settings.on_stale!r}, which does not exist")
        self.outcome.whole &= line.carried is None
        self.outcome.version = line.version
        self._data_order.begin(line.settings, line.lineage, self._prompts.begin())
        self._batch, self._totals = [], StepTotals()

    def _admit(self, line: Admitted) -> None:
        rollouts = self._rollouts
        before = rollouts.by_id.get(line.rollout)
        if before is not None:
            self._report(f"rollout {line.rollout} was admitted before, at {before.place}")
            return
        self._data_order.check_prompt(line.prompt, line.order)
        if not 0 <= line.version <= self.outcome.version:
            self._report(
                f"rollout {line.rollout} was admitted at version {line.version}, after step {self.outcome.version}"
            )
        if line.adopted and not self._lineage and self.outcome.whole:
            self._report(f"rollout {line.rollout} was adopted, and no lineage came before")
        if line.worker == _NOBODY and not line.adopted:
            self._report(f"rollout {line.rollout} was admitted for {_NOBODY}, and not adopted")
        if line.adopted and line.rollout in self._lost:
            self._lost.remove(line.rollout)
            self.outcome.lost -= 1
        self._prompts.admit(line)
        self._data_order.admit(line)
        rollouts.submitted += 1
        self.outcome.admitted |= bool(self.outcome.settings and self.outcome.settings.workers)
        known = AuditedRollout(line.prompt, line.order, line.version, self._place, line.attempt)
        rollouts.by_id[line.rollout] = known
        rollouts.move(known, RUNNING)

    def _finish(self, line: Finished) -> None:
        known = self._known(line.rollout)
        if known is None:
            return
        if known.fate != RUNNING:
            self._report(f"rollout {line.rollout} finished and was {known.fate} before")
            return
        if line.tokens <= 0:
            self._report(f"rollout {line.rollout} finished with {line.tokens} tokens")
        known.tokens = line.tokens
        self._rollouts.move(known, FINISHED)

    def _drop(self, line: Dropped) -> None:
        known = self._ending(line.rollout, DROPPED)
        if known is None:
            return
        if not line.reason or (line.reason in _PROMPT_STAYS and line.prompt is PromptGoes.given_up):
            self._report(
                f"rollout {line.rollout} was dropped for {line.reason!r} and its prompt {line.prompt}: both cannot be"
            )
        if line.attempt is not None and (
            line.prompt is not PromptGoes.returned or not 0 <= line.attempt - known.attempt <= 1
        ):
            self._report(
                f"rollout {line.rollout} was attempt {known.attempt}, and its prompt ({line.prompt}) is to be "
                f"tried again as attempt {line.attempt}"
            )
        self._rollouts.move(known, DROPPED, line.reason)
        self._prompts.end(known.prompt, line.rollout)
        if line.prompt is PromptGoes.returned and line.attempt:
            self._prompts.put_off(known.prompt)
        if line.prompt is PromptGoes.given_up:
            self._use(known.prompt, "dropped for good")

    def _ending(self, rollout_id: str, how: str) -> AuditedRollout | None:
        """Return the rollout that ends now in the way `how`; None if it is unknown or has ended before."""
        known = self._known(rollout_id)
        if known is None:
            return None
        if known.fate not in (RUNNING, FINISHED):
            self._report(f"rollout {rollout_id} was {how} and {known.fate} before: it has two ends")
            return None
        return known

    def _abandon(self, line: Abandoned) -> None:
        known = self._ending(line.rollout, ABANDONED)
        if known is not None:
            self._rollouts.move(known, ABANDONED)
            self._prompts.end(known.prompt, line.rollout)

    def _train(self, line: Trained) -> None:
        known = self._known(line.rollout)
        self._data_order.check_prompt(line.prompt, line.order)
        if known is None:
            return
        if known.fate == TRAINED:
            self._report(f"rollout {line.rollout} was trained before")
            return
        if known.fate != FINISHED:
            self._report(f"rollout {line.rollout} was trained and {known.fate} before: it does not count")
        if (line.prompt, line.order) != (known.prompt, known.order):
            self._report(
                f"rollout {line.rollout} is of prompt {line.prompt} (order {line.order}), and was admitted "
                f"({known.place}) for {known.prompt} (order {known.order})"
            )
        self._check_lineage(line.lineage)
        self._check_ages(line, known)
        for wrong in (*wrong_opponents(line), *wrong_policies(line)):
            self._report(wrong)
        self._rollouts.move(known, TRAINED)
        self._prompts.end(known.prompt, line.rollout)
        self._use(line.prompt, f"trained at step {line.step}")
        known.step = line.step
        self._batch.append(known)
        self.outcome.rollouts[line.rollout] = line
        settings = self.outcome.settings
        self._totals.add(line, known.tokens, settings.max_head_offpolicyness if settings else None)

    def _check_ages(self, line: Trained, known: AuditedRollout) -> None:
        name = f"rollout {line.rollout}"
        if not 1 <= line.episodes <= line.samples or any(count < 1 for count in line.versions.values()):
            self._report(f"{name} has {line.samples} samples and the tokens {line.versions}")
        settings = self.outcome.settings
        if not line.versions or settings is None:
            return
        oldest, newest = min(line.versions), max(line.versions)
        if settings.workers and oldest < known.version:  # kept samples have the ages that they had
            self._report(f"{name} has tokens of version {oldest}, and was admitted at version {known.version}")
        if newest >= line.step:
            self._report(f"{name} has tokens of version {newest}, and was trained at step {line.step}")
        decisive = newest if settings.on_stale == "mask" else oldest
        eta = settings.max_head_offpolicyness
        if (age := line.step - 1 - decisive) > eta:
            self._report(f"{name} was trained at the age of {age} versions; max_head_offpolicyness={eta}")

    def _step(self, line: Step) -> None:
        self._check_lineage(line.lineage)
        if line.step != self.outcome.version + 1:
            self._report(f"step {line.step} after step {self.outcome.version}")
        settings = self.outcome.settings
        if settings is not None and len(self._batch) != (wanted := settings.train_batch_size):
            self._report(f"step {line.step} trained {len(self._batch)} rollouts; train_batch_size={wanted}")
        if stray := sum(known.step != line.step for known in self._batch):
            self._report(
                f"{stray} of the rollouts before step {line.step} were trained at another step, by their lines"
            )
        orders = [known.order for known in self._batch]
        if orders != sorted(orders):
            self._report(f"the rollouts of step {line.step} are not in the data order")
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
        if live := self._rollouts.live:
            self._report(f"the launch ended, and {live} rollouts have no end")
        self.outcome.ended = True

    def _check_books(self, books: RolloutCounts) -> None:
        for wrong in self._rollouts.check_books(books):
            self._report(wrong)

    def _use(self, prompt: str, how: str) -> None:
        if self._prompts.use(prompt, how, self._place):
            self.outcome.used.append(prompt)

    def _check_lineage(self, lineage: int) -> None:
        if lineage != self._lineage:
            self._report(f"a line of lineage {lineage} within lineage {self._lineage}")

    def _check_data_order(self) -> None:
        if self.outcome.whole:
            self._data_order.check_none_passed_over()

    def _known(self, rollout_id: str) -> AuditedRollout | None:
        known = self._rollouts.by_id.get(rollout_id)
        if known is None:
            self._report(f"rollout {rollout_id} was never admitted")
        return known
