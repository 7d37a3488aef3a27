"""Prompts that may have killed their worker: found out one by one, and dropped before they use up its restarts.

A worker plays many prompts at once, and dies with all of them in hand. One of them may be why (an environment that runs
out of memory, a native parser that crashes), or none, where something outside killed the worker. A prompt that kills
would do it again in the same company, and nobody could tell which it was. So:

1. After a death every prompt that was in hand is a suspect. A worker plays one suspect at a time, beside prompts that
   are none. A suspect that comes to its end is cleared.
2. A suspect that was in hand at a second death is tried alone: its worker plays out what it has in hand and begins
   nothing else until the suspect has ended.
3. A suspect that was alone in hand at a third death is dropped for good (`crashed_worker`).

Only the suspect in hand is blamed for a death, and nobody if there was other company where it should have been alone.
So a prompt that crashes its worker costs three restarts, and each further one of the same company two.

SIGKILL mostly comes from outside (the kernel, where memory ran out, is told apart: `asyncrl.runtime.keeper`). It may
still be a prompt's doing: code that sends it to itself, or a guard of the host's memory that is not the kernel. So it
counts half: a prompt that is there at each of six is dropped, the last two of which it was alone at. And once no prompt
was in hand at all of them, somebody kills workers, and it counts nothing for as long as this manager lives.

Example: A, B and C are in hand when the worker dies. Its successor plays A with D and E: all end well, A is cleared.
It plays B with F and G, and dies. F, G and C are played; then B, alone. The worker dies once more: B is dropped.

Suspicions die with the manager: nobody else knows how a worker died. A prompt that kills is found out again by the
deaths that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

CRASH, KILL = 2, 1
"""Points that a death adds to the running suspect."""
ALONE = 2 * CRASH
"""A suspect with so much against it is tried alone."""
DROPPED = 3 * CRASH
"""A suspect with so much against it is dropped: after half the restarts that a process has by default where it crashes
its worker (`system.restarts_per_process`), and after all of them where it kills it, so that one bad row ends no run.
"""


class Suspects:
    """See the module's docstring. Pure state; bounded by the prompts that are in hand when workers die.

    Args:
        in_hand: the prompts that a worker plays now.
    """

    def __init__(self, in_hand: Callable[[str], Collection[str]]) -> None:
        self._in_hand = in_hand
        self._against: dict[str, int] = {}
        self._playing: dict[str, str] = {}
        self._promised: dict[str, str] = {}  # by worker the suspect that it plays next, alone
        self._at_every_kill: frozenset[str] | None = None  # the prompts in hand at all of them; None before the first

    def __bool__(self) -> bool:
        """True if there is a suspect."""
        return bool(self._against)

    def tried_alone(self, prompt_id: str) -> bool:
        """True if nothing is to be played beside `prompt_id` in the same worker."""
        return self._against.get(prompt_id, 0) >= ALONE

    def tries_alone(self, worker: str) -> bool:
        """True if `worker` plays a suspect beside which it begins nothing."""
        return worker in self._playing and self.tried_alone(self._playing[worker])

    def promised_to(self, worker: str) -> list[str]:
        """The suspects that `worker` may be the one to try alone: the one that it was promised, or any that is free."""
        if (mine := self._promised.get(worker)) is not None and self.tried_alone(mine):
            return [mine]
        others = {prompt for other, prompt in self._promised.items() if other != worker}
        return [prompt for prompt in self._against if self.tried_alone(prompt) and prompt not in others]

    def promise(self, worker: str, prompt_id: str) -> None:
        """`worker` is to play `prompt_id` next, and begins nothing until its hands are empty."""
        self._promised[worker] = prompt_id

    def must_wait(self, worker: str, prompt_id: str) -> bool:
        """True if `worker` may not begin `prompt_id` now, because of what else it plays."""
        playing = self._playing.get(worker, prompt_id)
        if playing != prompt_id:
            return prompt_id in self._against or self.tried_alone(playing)
        return self.tried_alone(prompt_id) and any(other != prompt_id for other in self._in_hand(worker))

    def began(self, worker: str, prompt_id: str) -> None:
        """`worker` plays `prompt_id`."""
        if prompt_id in self._against and self._playing.get(worker) != prompt_id:
            self._playing[worker] = prompt_id

    def ended(self, worker: str, prompt_id: str) -> None:
        """`prompt_id` came to an end on `worker`, whichever: it kills nobody, and another may be alone there now."""
        self._against.pop(prompt_id, None)
        if self._playing.get(worker) == prompt_id:
            self._stop(worker)

    def silent(self, worker: str) -> None:
        """`worker` is not heard, which need not be a death; what it had in hand is played again."""
        self._stop(worker)

    def died(self, worker: str, in_hand: Collection[str], *, killed: bool = False) -> str | None:
        """`worker` died with these prompts in hand, `killed` from outside as the launcher says; returns the one that is
        to be dropped for good, if there is one.
        """
        suspect = self._stop(worker)
        if killed:
            at_this = frozenset(in_hand)
            self._at_every_kill = at_this if self._at_every_kill is None else self._at_every_kill & at_this
            if not self._at_every_kill:
                return None
        count = KILL if killed else CRASH
        if suspect is None or suspect not in self._against:  # or another worker saw it end
            for prompt_id in in_hand:
                self._against.setdefault(prompt_id, count)
            return None
        if self.tried_alone(suspect) and any(other != suspect for other in in_hand):
            return None
        self._against[suspect] += count
        if self._against[suspect] < DROPPED:
            return None
        del self._against[suspect]
        return suspect

    def _stop(self, worker: str) -> str | None:
        """`worker` plays no suspect from now on; returns the one that it played."""
        self._promised.pop(worker, None)
        return self._playing.pop(worker, None)
