"""How many tokens an answer has: a function of its seed, so that an interrupted answer goes on to the same end.

Log-normal: reasoning models' lengths have a median of some thousand tokens and a tail that only the length limit ends.
Answers to one prompt are alike: of the variance of the logarithm the share `alike` is the prompt's.

    log length = log median + σ (√alike · z(prompt) + √(1 - alike) · z(answer)),   z standard normal

Or the lengths that a real run recorded, of which each answer is one by chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

from asyncrl.inference.seeds import uniform

_NORMAL = NormalDist()


class Lengths(Protocol):
    """Tokens of an answer by the numbers of its prompt and its own seed."""

    def tokens(self, prompt: int, seed: int) -> int:
        """At least 1."""
        ...


def _normal(seed: int) -> float:
    return _NORMAL.inv_cdf(min(max(uniform(seed, 0), 1e-12), 1 - 1e-12))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """See the module's docstring; `median` and `limit`, the longest answer, in tokens."""

    median: float
    sigma: float
    limit: int
    alike: float = 0.5

    def tokens(self, prompt: int, seed: int) -> int:
        """See `Lengths`."""
        z = math.sqrt(self.alike) * _normal(prompt) + math.sqrt(1 - self.alike) * _normal(seed)
        return max(1, min(self.limit, round(self.median * math.exp(self.sigma * z))))

    def coarse(self, grain: int) -> LogNormal:
        """In units of `grain` tokens."""
        return LogNormal(self.median / grain, self.sigma, max(1, self.limit // grain), self.alike)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Lengths of a real run, in tokens; each answer's is drawn from them by its seed."""

    lengths: tuple[int, ...]

    def tokens(self, prompt: int, seed: int) -> int:
        """See `Lengths`."""
        return self.lengths[int(uniform(seed, 0) * len(self.lengths))]

    def coarse(self, grain: int) -> Recorded:
        """In units of `grain` tokens."""
        return Recorded(tuple(max(1, round(length / grain)) for length in self.lengths))

    @staticmethod
    def of_run(run_dir: Path) -> Recorded:
        """Of the samples that a run kept (`samples.every=1`).

        Raises:
            ValueError: it kept none.
        """
        import pyarrow.parquet as pq

        found: list[int] = []
        for file in sorted((run_dir / "samples").glob("*.parquet")):
            masks = pq.read_table(file, columns=["loss_mask"])["loss_mask"].to_pylist()
            found += [sum(mask) for mask in masks]
        if not found:
            raise ValueError(f"{run_dir} keeps no samples to take lengths from; run it with samples.every=1")
        return Recorded(tuple(found))
