"""Find the prompts that kill their worker ("poison messages"), and drop them before they use up its restarts.

A worker runs many prompts at once, and dies with all of them. One of them may be the cause (an environment that runs
out of memory, a native parser that crashes), or none, if something outside killed the worker. A prompt that kills would
kill again in the same company, and could not be told from its neighbours. So:

1. After a death every running prompt is a suspect. A worker runs one suspect at a time, beside prompts that are not. A
   suspect that ends is cleared.
2. A suspect that was running at a second death runs alone: its worker first finishes what it runs, and begins nothing
   else until the suspect has ended.
3. A suspect that was running alone at a third death is dropped for good (`crashed_worker`).

Only the running suspect is blamed for a death. Nothing is blamed if a suspect that should have been alone was not. So a
prompt that crashes its worker costs three restarts, and each further one of the same company two.

SIGKILL mostly comes from outside. (`asyncrl.runtime.supervisor` recognises the kernel's kills when memory ran out.) It
may still be a prompt's doing: code that sends it to itself, or a memory guard other than the kernel. So it counts half:
a prompt that is running at six such deaths, at the last two of them alone, is dropped. Once no prompt was running at
all of them, something outside kills workers, and SIGKILL counts nothing for as long as this manager lives.

Example: A, B and C are running when the worker dies. Its successor runs A with D and E: all end well, A is cleared.
It runs B with F and G, and dies. F, G and C are run; then B, alone. The worker dies once more: B is dropped.

Suspicions die with the manager: no other process knows how a worker died. A prompt that kills is found again by the
deaths that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

CRASH, KILL = 2, 1
"""Points that a death adds to the running suspect."""
ALONE = 2 * CRASH
"""Points at which a suspect runs alone."""
DROPPED = 3 * CRASH
"""Points at which a suspect is dropped. A prompt that crashes its worker uses half the restarts that a process has by
default (`system.restarts_per_process`), one that kills it all of them. So one bad row ends no run.
"""


class Suspects:
    """Points against prompts, and the running suspects. Pure state, bounded by the prompts running when workers die.

    Args:
        in_hand: returns the prompts that a worker runs now.
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
        """True if `prompt_id` must run alone in its worker."""
        return self._against.get(prompt_id, 0) >= ALONE

    def tries_alone(self, worker: str) -> bool:
        """True if `worker` runs a suspect that must be alone."""
        return worker in self._playing and self.tried_alone(self._playing[worker])

    def promised_to(self, worker: str) -> list[str]:
        """Return the suspects that `worker` may run alone: the one promised to it, or all that are promised to none."""
        if (mine := self._promised.get(worker)) is not None and self.tried_alone(mine):
            return [mine]
        others = {prompt for other, prompt in self._promised.items() if other != worker}
        return [prompt for prompt in self._against if self.tried_alone(prompt) and prompt not in others]

    def promise(self, worker: str, prompt_id: str) -> None:
        """Reserve `prompt_id` for `worker`, which begins no other prompt until all that it runs has ended."""
        self._promised[worker] = prompt_id

    def must_wait(self, worker: str, prompt_id: str) -> bool:
        """True if `worker` may not begin `prompt_id` now, because of what else it runs."""
        playing = self._playing.get(worker, prompt_id)
        if playing != prompt_id:
            return prompt_id in self._against or self.tried_alone(playing)
        return self.tried_alone(prompt_id) and any(other != prompt_id for other in self._in_hand(worker))

    def began(self, worker: str, prompt_id: str) -> None:
        """Record that `worker` runs `prompt_id`."""
        if prompt_id in self._against and self._playing.get(worker) != prompt_id:
            self._playing[worker] = prompt_id

    def ended(self, worker: str, prompt_id: str) -> None:
        """Clear `prompt_id`, which ended on `worker` in some way; another suspect may run there."""
        self._against.pop(prompt_id, None)
        if self._playing.get(worker) == prompt_id:
            self._stop(worker)

    def silent(self, worker: str) -> None:
        """Record that `worker` is silent, which need not be a death; its prompts are played again."""
        self._stop(worker)

    def died(self, worker: str, in_hand: Collection[str], *, killed: bool = False) -> str | None:
        """Record that `worker` died.

        Args:
            in_hand: prompts that it ran.
            killed: the launcher reports that it was killed from outside.

        Returns:
            The prompt that must be dropped for good; None if there is none.
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
        """Record that `worker` runs no suspect from now on; return the one that it ran."""
        self._promised.pop(worker, None)
        return self._playing.pop(worker, None)
