"""Replay of the surviving history of a ledger, line by line, with the rules that every run must keep.

- Exactly once: no prompt of an epoch is trained twice, or after it was dropped for good; a prompt has one live rollout
  at most, and none once it is used; a rollout has one end. The number of an attempt follows from the earlier ones.
- Counts: at every line with the gate's counters, they are the totals of the lines; at the end no rollout is left over.
- Ages: the step from version v to v + 1 trains no token older than v - max_head_offpolicyness (under `on_stale=mask`:
  none but such tokens), none of a version that did not exist, and none older than the rollout's admission.
- Times, by the clock of the GserverManager, which writes the ledger: it goes forward, or is set back for good, after
  which all times are earlier. Clocks are sometimes set back, so that is only a note. A single line whose time fits
  neither its predecessor nor its successor was changed. The exception is a line next to a pause that explains it: a
  clock that is set back during a long pause looks the same.
- Order: steps are numbered without a gap and have train_batch_size rollouts each, in the data order; a prompt's id is
  the one that the seed gives its place in the data order; no prompt was passed over.
- Policies: policy servers' versions existed, and no policy is trained on more tokens than its servers generated for the
  rollout, or on samples that belong to another one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from asyncrl.comm.ended_rollouts import (
    Abandoned,
    Admitted,
    Begin,
    Dropped,
    End,
    Finished,
    Line,
    PromptFate,
    RolloutCounts,
    RunSettings,
    Step,
    Trained,
)
from asyncrl.verify.audit.ledger_files import Entry, Outcome, Report, StepTotals

CLOCKS_S = 60.0
"""Largest correction of a clock, in seconds, that is not reported."""
_LONG = 2.0
"""A pause that is more than this many times as long as every other pause does not explain an earlier time."""


class Clock:
    """The times in a ledger, in the order of its lines."""

    def __init__(self) -> None:
        self._times: list[tuple[str, float]] = []

    def note_time(self, location: str, line: Line) -> None:
        """Add the time of the line at `location`, if it has one."""
        if not isinstance(line, Trained):
            self._times.append((location, line.at))

    def check(self, report: Report, note: Report) -> None:
        """Report lines whose time cannot be right; note where the clock was set back."""
        times = [at for _, at in self._times]
        pauses = sorted((later - earlier for earlier, later in pairwise(times)), reverse=True)

        def is_longest(pause: float) -> bool:
            return pause == pauses[0] and (len(pauses) < 2 or pause > _LONG * max(pauses[1], CLOCKS_S))

        for number in range(1, len(times)):
            back = times[number - 1] - times[number]
            if back <= CLOCKS_S:
                continue
            location = self._times[number][0]
            after, before = times[number : number + 2], times[max(0, number - 2) : number]
            if len(after) > 1 and after[1] - after[0] >= back - CLOCKS_S and is_longest(after[1] - after[0]):
                report(location, f"its time is {back:.0f} s before that of the lines around it")
            elif len(before) > 1 and before[1] - before[0] >= back - CLOCKS_S and is_longest(before[1] - before[0]):
                report(self._times[number - 1][0], f"its time is {back:.0f} s after that of the lines around it")
            else:
                note(location, f"the clock of the GserverManager was set back by {back:.0f} s")


RUNNING, FINISHED, TRAINED, ABANDONED, DROPPED = "running", "finished", "trained", "abandoned", "dropped"


@dataclass(slots=True)
class AuditedRollout:
    """A rollout as of the current line.

    Attributes:
        location: line of its admission.
        fate: empty before it is counted.
        reason: reason of its drop.
        step: step that trained it.
        tokens: all tokens; None until it is finished.
    """

    prompt: str
    order: int
    version: int
    location: str
    attempt: int = 0
    fate: str = ""
    reason: str = ""
    step: int = -1
    tokens: int | None = None


class Rollouts:
    """Rollouts by id. Each counter is the number of rollouts with its fate, as the gate counts them.

    Attributes:
        by_id: all rollouts of the history, except those that were running or waiting when a launch ended.
        submitted: number of admissions.
        dropped: counts by reason.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, AuditedRollout] = {}
        self.submitted = 0
        self.dropped: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def begin(self, line: Begin) -> set[str]:
        """Begin a lineage; return the rollouts that were live before, and are not unless they are adopted."""
        lost = {key for key, known in self.by_id.items() if known.fate in (RUNNING, FINISHED)}
        for rollout_id in lost:
            self.move(self.by_id.pop(rollout_id), "")
        if line.carried is not None:
            self.dropped = Counter(line.carried.dropped)
        # The gate counts the present train_batch_size per version, even if it was different in earlier launches.
        self._counts[TRAINED] = line.version * line.settings.train_batch_size
        self.submitted = self._counts[TRAINED] + self.dropped.total()
        return lost

    def move(self, rollout: AuditedRollout, fate: str, reason: str = "") -> None:
        """Change the fate of `rollout`, and the counters with it; an empty fate is not counted."""
        if rollout.fate == DROPPED:
            self.dropped[rollout.reason] -= 1
        elif rollout.fate:
            self._counts[rollout.fate] -= 1
        rollout.fate, rollout.reason = fate, reason
        if fate == DROPPED:
            self.dropped[reason] += 1
        elif fate:
            self._counts[fate] += 1

    def count(self, fate: str) -> int:
        """Return the number of rollouts with this fate, other than dropped."""
        return self._counts[fate]

    @property
    def live(self) -> int:
        """Return the number of rollouts without an end."""
        return self._counts[RUNNING] + self._counts[FINISHED]

    def check_counts(self, counts: RolloutCounts) -> Iterator[str]:
        """Yield a message for each counter in `counts` that differs from the total of the lines."""
        added = {
            "submitted": self.submitted,
            "trained": self._counts[TRAINED],
            "dropped": dict(+self.dropped),
            "abandoned": self._counts[ABANDONED],
            "running": self._counts[RUNNING],
            "finished_untrained": self._counts[FINISHED],
        }
        for name, value in added.items():
            if (stated := getattr(counts, name)) != value:
                yield f"the rollout counts have {name} {stated}, the lines add up to {value}"


class PromptAttempts:
    """Attempts at each prompt of a ledger's history, and how the prompt was used.

    Args:
        report: called with an error in the current line.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._used: dict[str, str] = {}  # by prompt, the place of the line that trained it or dropped it for good
        self._live: dict[str, str] = {}  # by prompt, its live rollout
        self._put_off: set[str] = set()  # prompts that had a later attempt, which comes after the rest of their epoch
        self._attempts: Counter[str] = Counter()  # rollouts of a prompt

    def begin(self) -> list[str]:
        """Begin a lineage without live rollouts.

        Returns:
            The prompts that it need not run at their place in the order.
        """
        self._live.clear()
        return [*self._used, *self._put_off]

    def admit(self, line: Admitted) -> None:
        """Count an attempt."""
        if (how := self._used.get(line.prompt)) is not None:
            self._report(f"rollout {line.rollout} was admitted, and its prompt {line.prompt} was {how}")
        if (other := self._live.setdefault(line.prompt, line.rollout)) != line.rollout:
            self._report(f"rollout {line.rollout} was admitted, and rollout {other} of prompt {line.prompt} is live")
        if line.adopted:  # lines about earlier attempts may be ruled out, or lost with a manager
            self._attempts[line.prompt] = max(self._attempts[line.prompt], line.attempt)
        before_it = self._attempts[line.prompt]
        if not 0 <= line.attempt <= before_it:
            self._report(f"rollout {line.rollout} is attempt {line.attempt} at a prompt that had {before_it} before")
        self._attempts[line.prompt] += 1
        if line.attempt:
            self._put_off.add(line.prompt)

    def end(self, prompt: str, rollout_id: str) -> None:
        """Record that the rollout of the prompt is no longer live."""
        if self._live.get(prompt) == rollout_id:
            del self._live[prompt]

    def put_off(self, prompt: str) -> None:
        """Expect a later attempt of the prompt, which may come after the rest of the epoch."""
        self._put_off.add(prompt)

    def use(self, prompt: str, how: str, location: str) -> bool:
        """Count the prompt as used at `location`; return False if it was used before."""
        if prompt in self._used:
            self._report(f"prompt {prompt} is {how}, and was {self._used[prompt]}")
            return False
        self._used[prompt] = f"{how} ({location})"
        return True


_PROMPT_ID = re.compile(r"e(\d+)-(\d+)")
_WORKER = re.compile(r"[a-z_]+/\d+")


class DataOrder:
    """Compares the prompts in a ledger's lines, launch by launch, with the order given by the settings.

    Args:
        rows: number of rows of the training data; None if unknown, so that prompt ids cannot be checked.
        report: called with an error in the current line.
    """

    def __init__(self, rows: int | None, report: Callable[[str], None]) -> None:
        self._rows, self._report = rows, report
        self._orders: dict[str, int] = {}  # by prompt, over all lineages; the fields below are for this lineage only
        self._settings: RunSettings | None = None
        self._lineage = 0
        self._admitted: set[int] = set()
        self._newest = -1
        self._used_before: set[int] = set()

    def begin(self, settings: RunSettings, lineage: int, used: Iterable[str]) -> None:
        """Begin a launch. The prompts in `used` were trained, dropped for good, or have a later place now."""
        self._settings, self._lineage = settings, lineage
        self._newest = -1
        self._admitted, self._used_before = set(), {self._orders[prompt] for prompt in used}

    def check_prompt(self, prompt: str, order: int) -> None:
        """Check that a prompt has the same place as before, and that the seed gives this place its id."""
        match = _PROMPT_ID.fullmatch(prompt)
        known = self._orders.setdefault(prompt, order)
        if known != order or order < 0:
            self._report(f"prompt {prompt} is at place {order} of the data order, and was at {known}")
        if match is None:
            self._report(f"prompt {prompt!r}: ids are e<epoch>-<row>")
        elif self._rows and self._settings and self._settings.workers and min(order, self._settings.seed) >= 0:
            epoch, position = divmod(order, self._rows)
            seed, shuffled = self._settings.seed, self._settings.shuffle
            row = int(_permutation(self._rows, seed, epoch)[position]) if shuffled else position
            if (epoch, row) != (int(match[1]), int(match[2])):
                self._report(f"place {order} of the data order is of prompt e{epoch}-{row}, not of {prompt}")

    def admit(self, line: Admitted) -> None:
        """Add an admitted prompt."""
        if not _WORKER.fullmatch(line.worker):
            self._report(f"rollout {line.rollout} runs on {line.worker!r}, which is not the name of a worker")
        self._admitted.add(line.order)
        if not line.adopted:
            self._newest = max(self._newest, line.order)

    def check_none_passed_over(self) -> None:
        """Check that all prompts before the last one admitted in this lineage were also admitted in it, or used before.

        Rollouts adopted from a dead manager do not count as the last: earlier prompts may have been lost with that
        manager, and wait.
        """
        newest = self._newest
        if self._settings is None or not self._settings.workers or newest < 0:
            return
        seen = {order for order in self._admitted | self._used_before if 0 <= order < newest}
        if (missing := newest - len(seen)) > 0:  # counted, since a forged place may be beyond all bounds
            orders = list(islice((order for order in range(newest) if order not in seen), 5))
            some = f"{orders}{' ...' if missing > 5 else ''}"
            self._report(
                f"places {some} of the data order ({missing}) were passed over in lineage {self._lineage}: "
                "their prompts were neither run nor used before"
            )


@lru_cache(maxsize=8)
def _permutation(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of an epoch's rows, as `docs/ledger.md` defines it."""
    return np.random.default_rng([seed, epoch]).permutation(rows)


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

    def __init__(self, rows: int | None, report: Report, note: Report = lambda location, what: None) -> None:
        self.outcome = Outcome()
        self._report_to, self._note_to = report, note
        self._location = ""
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
            self._location = entry.location
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
        self._report_to(self._location, what)

    def _take(self, line: Line) -> None:
        self._clock.note_time(self._location, line)
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
            self._report(f"rollout {line.rollout} was admitted before, at {before.location}")
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
        known = AuditedRollout(line.prompt, line.order, line.version, self._location, line.attempt)
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
        if not line.reason or (line.reason in _PROMPT_STAYS and line.prompt is PromptFate.given_up):
            self._report(
                f"rollout {line.rollout} was dropped for {line.reason!r} and its prompt {line.prompt}: both cannot be"
            )
        if line.attempt is not None and (
            line.prompt is not PromptFate.returned or not 0 <= line.attempt - known.attempt <= 1
        ):
            self._report(
                f"rollout {line.rollout} was attempt {known.attempt}, and its prompt ({line.prompt}) is to be "
                f"tried again as attempt {line.attempt}"
            )
        self._rollouts.move(known, DROPPED, line.reason)
        self._prompts.end(known.prompt, line.rollout)
        if line.prompt is PromptFate.returned and line.attempt:
            self._prompts.put_off(known.prompt)
        if line.prompt is PromptFate.given_up:
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
                f"({known.location}) for {known.prompt} (order {known.order})"
            )
        self._check_lineage(line.lineage)
        self._check_ages(line, known)
        for wrong in (*_wrong_policy_servers(line), *_wrong_policies(line)):
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
        self.outcome.steps[line.step], self.outcome.counts_at[line.step] = self._totals, line.counts
        self.outcome.steps_of_launch += 1
        self._batch, self._totals = [], StepTotals()
        self._check_counts(line.counts)

    def _end(self, line: End) -> None:
        self._check_lineage(line.lineage)
        if line.version != self.outcome.version:
            self._report(f"the launch ended at version {line.version}, after step {self.outcome.version}")
        self._check_counts(line.counts)
        if live := self._rollouts.live:
            self._report(f"the launch ended, and {live} rollouts have no end")
        self.outcome.ended = True

    def _check_counts(self, counts: RolloutCounts) -> None:
        for wrong in self._rollouts.check_counts(counts):
            self._report(wrong)

    def _use(self, prompt: str, how: str) -> None:
        if self._prompts.use(prompt, how, self._location):
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


def _wrong_policy_servers(line: Trained) -> Iterator[str]:
    """Yield a message for each policy server of a version that did not exist."""
    for policy, (oldest, newest) in line.policy_servers.items():
        if not 0 <= oldest <= newest < line.step:
            yield (
                f"rollout {line.rollout}, trained at step {line.step}, met versions {oldest} to {newest} of policy "
                f"{policy!r}: these versions did not exist then"
            )


def _wrong_policies(line: Trained) -> Iterator[str]:
    """Yield a message for each policy that was trained on tokens that it did not generate."""
    if not line.policies:
        return
    for policy, share in line.policies.items():
        if share.trained > share.generated:
            yield (
                f"rollout {line.rollout} trains policy {policy!r} on {share.trained} tokens, and it generated "
                f"{share.generated} in it: samples of another policy"
            )
    trained, tokens = sum(share.trained for share in line.policies.values()), sum(line.versions.values())
    samples = sum(share.samples for share in line.policies.values())
    if (trained, samples) != (tokens, line.samples):
        yield (
            f"rollout {line.rollout} has {tokens} tokens in {line.samples} samples, and its policies {trained} in "
            f"{samples}"
        )
