"""How many tokens an answer has: a function of its seed, so that an interrupted answer goes on to the same end.

Log-normal: reasoning models' lengths have a median of some thousand tokens and a tail that only the length limit ends.
Answers to one prompt are alike: of the variance of the logarithm the share `alike` is the prompt's.

    log length = log median + σ (√alike · z(prompt) + √(1 - alike) · z(answer)),   z standard normal

Or the groups that a real run recorded, of which each prompt is one by chance: its answers have their lengths, and part
where they parted (`own_from`), which tells how many rows an engine has to compute that computes what is the same once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple, Protocol

from asyncrl.inference.seeds import uniform

_NORMAL = NormalDist()


class Answer(NamedTuple):
    """`tokens` of an answer, at least 1. The first `own_from` of them are another's of its group, too. One that `leads`
    is the one that the others share them with."""

    tokens: int
    own_from: int = 0
    leads: bool = False


class Lengths(Protocol):
    """Answers by the numbers of the prompt, of its own seed, and of the member of the group."""

    def answer(self, prompt: int, seed: int, member: int) -> Answer:
        """The same for the same numbers."""
        ...

    def coarse(self, grain: int) -> Lengths:
        """In units of `grain` tokens."""
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
        """Of the answer."""
        z = math.sqrt(self.alike) * _normal(prompt) + math.sqrt(1 - self.alike) * _normal(seed)
        return max(1, min(self.limit, round(self.median * math.exp(self.sigma * z))))

    def answer(self, prompt: int, seed: int, member: int) -> Answer:
        """See `Lengths`."""
        return Answer(self.tokens(prompt, seed))

    def coarse(self, grain: int) -> LogNormal:
        """See `Lengths`."""
        return LogNormal(self.median / grain, self.sigma, max(1, self.limit // grain), self.alike)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The groups of a real run; of each its answers, as tokens and `own_from`, the first of which leads.

    `times`: they are so many times as long here.
    """

    groups: tuple[tuple[tuple[int, int], ...], ...]
    times: float = 1.0

    @property
    def mean(self) -> float:
        """Tokens of an answer."""
        lengths = [tokens for group in self.groups for tokens, _ in group]
        return self.times * sum(lengths) / len(lengths)

    def answer(self, prompt: int, seed: int, member: int) -> Answer:
        """See `Lengths`."""
        group = self.groups[int(uniform(prompt, 2) * len(self.groups))]
        tokens, own_from = group[member % len(group)]
        leads = member % len(group) == 0
        return Answer(max(1, round(self.times * tokens)), round(self.times * own_from), leads)

    def coarse(self, grain: int) -> Recorded:
        """See `Lengths`."""
        return Recorded(self.groups, self.times / grain)

    @staticmethod
    def of_run(run_dir: Path, after: int = 0) -> Recorded:
        """Of the samples that a run kept (`samples.every=1`), without those of its first `after` steps.

        Raises:
            ValueError: it kept none.
        """
        import pyarrow.parquet as pq

        answers: dict[str, list[list[int]]] = {}
        for file in sorted((run_dir / "samples").glob("*.parquet")):
            columns = pq.read_table(file, columns=["step", "rollout", "sample", "tokens", "loss_mask"]).to_pylist()
            for row in sorted(columns, key=lambda row: row["sample"]):
                if row["step"] > after:
                    kept = [token for token, own in zip(row["tokens"], row["loss_mask"], strict=True) if own]
                    answers.setdefault(row["rollout"], []).append(kept)
        if not answers:
            raise ValueError(f"{run_dir} keeps no samples to take lengths from; run it with samples.every=1")
        return Recorded(tuple(tuple(parting(group)) for _, group in sorted(answers.items())))

    @staticmethod
    def of_file(file: Path, times: float = 1.0) -> Recorded:
        """As `save` wrote it."""
        groups = json.loads(file.read_text())
        return Recorded(tuple(tuple((tokens, own_from) for tokens, own_from in group) for group in groups), times)

    def save(self, file: Path) -> None:
        """For `of_file`, without `times`."""
        lines = (json.dumps(group, separators=(",", ":")) for group in self.groups)
        file.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def parting(answers: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Of each answer of a group its tokens, and how many it begins with that one before it begins with, too."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for answer in answers:
        prefixes = [tuple(answer[:length]) for length in range(1, len(answer) + 1)]
        found.append((len(answer), sum(prefix in seen for prefix in prefixes)))
        seen.update(prefixes)
    return found
