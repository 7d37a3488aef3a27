"""Prompts on their way back: a dropped rollout's prompt is told to its worker until that worker runs it again.

A returned prompt gets a number. It is in every reply to its worker until the worker acknowledges the number, so a
lost reply loses no prompt. Acknowledged prompts are remembered until their next rollout is allocated: if the worker
dies before, its successor is told again.
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
        self._after = max([self._after, *(box.last_seq for box in state.values())])

    def give_back(self, worker: str, prompt_id: str, order: int, attempt: int = 0) -> None:
        """`prompt_id` is to be tried again by `worker`, as its `attempt`."""
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

    def owes(self, worker: str, prompt_id: str) -> bool:
        """Whether `prompt_id` is on its way back to `worker`, or there and not running yet."""
        box = self._boxes.get(worker)
        return box is not None and (prompt_id in box.unacknowledged or prompt_id in box.acknowledged)

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

    def running_again(self, worker: str, prompt_id: str) -> None:
        """A rollout of `prompt_id` has started, or the trainer has one after all: nothing is owed any more."""
        box = self._boxes.get(worker)
        if box is not None:
            box.acknowledged.pop(prompt_id, None)
            box.unacknowledged.pop(prompt_id, None)

    def worker_died(self, worker: str) -> None:
        """What the dead worker acknowledged and did not run is told to its successor."""
        box = self._boxes.get(worker)
        if box is not None:
            for prompt in list(box.acknowledged.values()):
                self.give_back(worker, prompt.prompt_id, prompt.order, prompt.attempt)
