"""Prompts that may have killed their worker: found out one by one, and given up before they use up its restarts.

A worker plays many prompts at once, and dies with all of them in hand. One of them may be why: an environment that
runs out of memory, a native parser that crashes. Played again with the same company it would only kill again, and
nobody could tell which it was. So after a death every prompt that was in hand is a suspect, and a worker plays one
suspect at a time, beside prompts that are none. A suspect that comes to its end is cleared. If the worker dies again,
it is the suspect in hand that has one more death to its name, and not the others; with `MAX_DEATHS` it is given up.

Example: A, B and C are in hand when the worker dies. Its successor plays A with D and E: all end well, A is cleared.
It plays B with F and G, and dies: B has two deaths, and is dropped (`crashed_worker`); F, G and C are played on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MAX_DEATHS = 2
"""Fewer than the restarts that a process has (`system.restarts_per_process`), so that one bad row ends no run."""


class Suspects:
    """See the module's docstring. Pure state; bounded by the prompts that are in hand when workers die."""

    def __init__(self) -> None:
        self._deaths: dict[str, int] = {}
        self._playing: dict[str, str] = {}
        self.changes = 0
        """Grows whenever a prompt that has to wait may have to no longer."""

    def state(self) -> tuple[dict[str, int], dict[str, str]]:
        """All there is; `restore` takes it."""
        return dict(self._deaths), dict(self._playing)

    def restore(self, deaths: Mapping[str, int], playing: Mapping[str, str]) -> None:
        """Be as `state` says."""
        self._deaths, self._playing = dict(deaths), dict(playing)
        self.changes += 1

    def must_wait(self, worker: str, prompt_id: str) -> bool:
        """Whether `worker` may not begin `prompt_id` now, as it plays another suspect."""
        return prompt_id in self._deaths and self._playing.get(worker, prompt_id) != prompt_id

    def began(self, worker: str, prompt_id: str) -> None:
        """`worker` plays `prompt_id`."""
        if prompt_id in self._deaths and self._playing.get(worker) != prompt_id:
            self._playing[worker] = prompt_id
            self.changes += 1

    def ended(self, worker: str, prompt_id: str) -> None:
        """`prompt_id` came to an end on `worker`, whichever: it kills nobody."""
        if self._deaths.pop(prompt_id, None) is not None:
            self.changes += 1
        if self._playing.get(worker) == prompt_id:
            self._stop(worker)

    def silent(self, worker: str) -> None:
        """`worker` is not heard, which need not be a death; what it had in hand is played again."""
        self._stop(worker)

    def died(self, worker: str, in_hand: Iterable[str]) -> set[str]:
        """`worker` died with these prompts in hand; returns those that are to be given up."""
        suspect = self._stop(worker)
        if suspect is None or suspect not in self._deaths:  # or another worker saw it end
            for prompt_id in in_hand:
                self._deaths.setdefault(prompt_id, 1)
            return set()
        self._deaths[suspect] += 1
        if self._deaths[suspect] < MAX_DEATHS:
            return set()
        del self._deaths[suspect]
        self.changes += 1
        return {suspect}

    def _stop(self, worker: str) -> str | None:
        """`worker` plays no suspect from now on; which it played."""
        suspect = self._playing.pop(worker, None)
        self.changes += suspect is not None
        return suspect
