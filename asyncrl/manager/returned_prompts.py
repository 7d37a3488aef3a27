"""Prompts on their way to a worker: a dropped rollout's back to it, another's to one that joined; until it runs them.

A returned prompt gets a number. It is in every reply to its worker until the worker acknowledges the number, so a
lost reply loses no prompt. Acknowledged prompts are remembered until their next rollout is allocated: if the worker
dies before, its successor is told again. A prompt is owed to one worker at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from asyncrl.manager.messages import ReturnedPrompt


@dataclass(slots=True)
class _Mailbox:
    last_seq: int
    unacknowledged: dict[str, ReturnedPrompt] = field(default_factory=dict)
    acknowledged: dict[str, ReturnedPrompt] = field(default_factory=dict)


class MailboxState(Struct, frozen=True):
    """What is on its way to one worker."""

    last_seq: int
    unacknowledged: list[ReturnedPrompt]
    acknowledged: list[ReturnedPrompt]


class ReturnedPrompts:
    """The prompts on their way back to each worker. Pure state; bounded by the rollouts a worker runs at once.

    Args:
        after: numbers begin above this. A manager that is restarted must not begin below what its predecessor gave out,
            or workers would take its returns for repetitions.
    """

    def __init__(self, after: int = 0) -> None:
        self._after = after
        self._boxes: dict[str, _Mailbox] = {}
        self._owed_to: dict[str, str] = {}  # by prompt the worker
        self._told_more: set[str] = set()

    def begin_above(self, seq: int) -> None:
        """Numbers begin above `seq`; nothing was returned yet."""
        self._after = seq

    def state(self) -> dict[str, MailboxState]:
        """All there is, by worker; `restore` takes it."""
        return {
            worker: MailboxState(box.last_seq, list(box.unacknowledged.values()), list(box.acknowledged.values()))
            for worker, box in self._boxes.items()
        }

    def restore(self, state: Mapping[str, MailboxState]) -> None:
        """Be as `state` says."""
        self._boxes = {
            worker: _Mailbox(
                box.last_seq,
                {prompt.prompt_id: prompt for prompt in box.unacknowledged},
                {prompt.prompt_id: prompt for prompt in box.acknowledged},
            )
            for worker, box in state.items()
        }
        self._owed_to = {
            prompt_id: worker
            for worker, box in self._boxes.items()
            for prompt_id in [*box.unacknowledged, *box.acknowledged]
        }
        self._after = max([self._after, *(box.last_seq for box in state.values())])

    def give_back(self, worker: str, prompt_id: str, order: int, attempt: int = 0) -> None:
        """`prompt_id` is to be tried again by `worker`, as its `attempt`, and by no other."""
        if self._owed_to.get(prompt_id, worker) != worker:
            self.running_again(prompt_id)
        self._owed_to[prompt_id] = worker
        box = self._boxes.setdefault(worker, _Mailbox(self._after))
        box.acknowledged.pop(prompt_id, None)
        if prompt_id not in box.unacknowledged:
            box.last_seq += 1
            self._told_more.add(worker)
            box.unacknowledged[prompt_id] = ReturnedPrompt(box.last_seq, prompt_id, order, attempt)

    def take_told_more(self) -> set[str]:
        """The workers to which prompts were returned since the last call of this."""
        workers, self._told_more = self._told_more, set()
        return workers

    def owed_to(self, prompt_id: str) -> str | None:
        """The worker that `prompt_id` is on its way to, or that has it and does not run it yet; None: there is none."""
        return self._owed_to.get(prompt_id)

    @property
    def workers(self) -> set[str]:
        """Those that ever were owed a prompt."""
        return set(self._boxes)

    def owed(self, worker: str) -> list[ReturnedPrompt]:
        """The prompts that are owed to `worker`."""
        box = self._boxes.get(worker)
        return [] if box is None else [*box.acknowledged.values(), *box.unacknowledged.values()]

    def pending(self, worker: str) -> list[ReturnedPrompt]:
        """What `worker` has not acknowledged yet, in the order of the numbers."""
        box = self._boxes.get(worker)
        return [] if box is None else list(box.unacknowledged.values())

    def acknowledge(self, worker: str, seq: int) -> bool:
        """`worker` has seen every number up to `seq`; whether that was news."""
        box = self._boxes.get(worker)
        if box is None:
            return False
        seen = [prompt for prompt in box.unacknowledged.values() if prompt.seq <= seq]
        for prompt in seen:
            box.acknowledged[prompt.prompt_id] = box.unacknowledged.pop(prompt.prompt_id)
        return bool(seen)

    def running_again(self, prompt_id: str) -> None:
        """A rollout of `prompt_id` has started, or the trainer has one after all: nothing is owed any more."""
        worker = self._owed_to.pop(prompt_id, None)
        if worker is not None:
            box = self._boxes[worker]
            box.acknowledged.pop(prompt_id, None)
            box.unacknowledged.pop(prompt_id, None)

    def worker_died(self, worker: str) -> None:
        """What the dead worker acknowledged and did not run is told to its successor."""
        box = self._boxes.get(worker)
        if box is not None:
            for prompt in list(box.acknowledged.values()):
                self.give_back(worker, prompt.prompt_id, prompt.order, prompt.attempt)
