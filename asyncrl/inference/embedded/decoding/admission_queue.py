"""Admission of waiting samples to the batch, in order of arrival, within the limits of rows and memory. No tensors, no
clocks.

The KV cache is a rectangle of rows x longest sample. A sample is admitted while `(running + 1) * longest reserved
length <= max_total_tokens`; its reserved length is prompt + max_new_tokens. So the rectangle never outgrows the limit,
whatever lengths the samples reach, and none has to be evicted for memory.

While a weight update waits for the running samples (`barrier`), those that arrived after it are held.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from asyncrl.inference.embedded.decoding.sequence import Sequence


@dataclass(slots=True)
class AdmissionQueue:
    """The waiting queue and the admission rule."""

    max_running: int
    max_total_tokens: int
    waiting: deque[Sequence] = field(default_factory=deque)
    barrier: int | None = None
    """Arrival number from which samples are held; None for no barrier."""

    def admit(self, running: list[Sequence]) -> list[Sequence]:
        """Take the samples from the queue that may join `running` now."""
        admitted: list[Sequence] = []
        longest = max((sample.reserved_tokens for sample in running), default=0)
        count = len(running)
        while self.waiting and count < self.max_running:
            candidate = self.waiting[0]
            if self.barrier is not None and candidate.arrival >= self.barrier:
                break
            longest = max(longest, candidate.reserved_tokens)
            if (count + 1) * longest > self.max_total_tokens:
                break
            admitted.append(self.waiting.popleft())
            count += 1
        return admitted

    def has_admissible(self) -> bool:
        """True if the barrier does not hold the head of the queue."""
        return bool(self.waiting) and (self.barrier is None or self.waiting[0].arrival < self.barrier)
