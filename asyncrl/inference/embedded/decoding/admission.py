"""Admission of waiting samples to the batch: first come, first served, within the limits of rows and memory. No
tensors, no clocks.

The KV cache is a rectangle of rows x longest sample, so a sample is admitted while `(running + 1) * longest reserved
length <= max_total_tokens`, the reserved length being prompt + max_new_tokens. With that rule the rectangle never
outgrows the bound, whatever lengths the samples come to: none has to be evicted for memory.

While a weight update waits for the samples in flight (`barrier`), those that arrived after it are held.
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
        """Take from the queue what may join `running` now."""
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
        """True where the head of the queue is not held by the barrier."""
        return bool(self.waiting) and (self.barrier is None or self.waiting[0].arrival < self.barrier)
