"""Prompts on their way back: a dropped rollout's prompt is told to its worker until that worker runs it again.

A returned prompt gets a number. It is in every reply to its worker until the worker acknowledges the number, so a
lost reply loses no prompt. Acknowledged prompts are remembered until their next rollout is allocated: if the worker
dies before, its successor is told again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.manager.messages import ReturnedPrompt


@dataclass(slots=True)
class _Mailbox:
    last_seq: int
    unacknowledged: dict[str, ReturnedPrompt] = field(default_factory=dict)
    acknowledged: dict[str, ReturnedPrompt] = field(default_factory=dict)


class ReturnedPrompts:
    """The prompts on their way back to each worker. Pure state; bounded by the rollouts a worker runs at once.

    Args:
        after: numbers begin above this. A manager that is restarted must not begin below what its predecessor gave out,
            or workers would take its returns for repetitions.
    """

    def __init__(self, after: int = 0) -> None:
        self._after = after
        self._boxes: dict[str, _Mailbox] = {}

    def give_back(self, worker: str, prompt_id: str, order: int, attempt: int = 0) -> None:
        """`prompt_id` is to be tried again by `worker`, as its `attempt`."""
        box = self._boxes.setdefault(worker, _Mailbox(self._after))
        box.acknowledged.pop(prompt_id, None)
        if prompt_id not in box.unacknowledged:
            box.last_seq += 1
            box.unacknowledged[prompt_id] = ReturnedPrompt(box.last_seq, prompt_id, order, attempt)

    def owes(self, worker: str, prompt_id: str) -> bool:
        """Whether `prompt_id` is on its way back to `worker`, or there and not running yet."""
        box = self._boxes.get(worker)
        return box is not None and (prompt_id in box.unacknowledged or prompt_id in box.acknowledged)

    def pending(self, worker: str) -> list[ReturnedPrompt]:
        """What `worker` has not acknowledged yet, in the order of the numbers."""
        box = self._boxes.get(worker)
        return [] if box is None else list(box.unacknowledged.values())

    def acknowledge(self, worker: str, seq: int) -> None:
        """`worker` has seen every number up to `seq`."""
        box = self._boxes.get(worker)
        if box is None:
            return
        for prompt in [prompt for prompt in box.unacknowledged.values() if prompt.seq <= seq]:
            box.acknowledged[prompt.prompt_id] = box.unacknowledged.pop(prompt.prompt_id)

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
