"""Lengths of answers in tokens: a function of the seed, so that an interrupted answer continues to the same end.

Log-normal: lengths of reasoning models' answers have a median of some thousand tokens and a tail up to the length
limit. Answers to one prompt are similar: the share `alike` of the logarithm's variance is common to a prompt.

    log length = log median + σ (√alike · z(prompt) + √(1 - alike) · z(answer)),   z standard normal

Alternatively the recorded groups of a real run. Each prompt is assigned a random group. Its answers have the same
lengths and differ from the same token on (`own_from`). This determines the number of rows of an engine that computes
equal tokens once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple, Protocol

from asyncrl.inference.random_streams import uniform

_NORMAL = NormalDist()


class Answer(NamedTuple):
    """Length of an answer in `tokens`, at least 1. It shares its first `own_from` tokens with the answer of its group
    that `leads`.
    """

    tokens: int
    own_from: int = 0
    leads: bool = False


class Lengths(Protocol):
    """Lengths of answers, by the prompt's number, the answer's seed, and the number of the member of the group."""

    def answer(self, prompt: int, seed: int, member: int) -> Answer:
        """Return the answer; equal numbers give equal answers."""
        ...

    def coarse(self, grain: int) -> Lengths:
        """Return the same lengths in units of `grain` tokens."""
        ...


def _normal(seed: int) -> float:
    return _NORMAL.inv_cdf(min(max(uniform(seed, 0), 1e-12), 1 - 1e-12))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal lengths. `median` and `limit` (the longest answer) are in tokens."""

    median: float
    sigma: float
    limit: int
    alike: float = 0.5

    def tokens(self, prompt: int, seed: int) -> int:
        """Return the number of tokens of the answer."""
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
    """The groups of a real run. Each answer has tokens, `own_from` and reward, and the first answer of a group leads.

    `times`: factor of the lengths. `apart`: engines compute each answer separately, as on GPUs. `in_order`: prompts are
    numbered by their places and have their own groups. After the last group the order is reversed.
    """

    groups: tuple[tuple[tuple[int, int, float], ...], ...]
    times: float = 1.0
    apart: bool = False
    in_order: bool = False

    @property
    def mean(self) -> float:
        """Return the mean number of tokens of an answer."""
        lengths = [tokens for group in self.groups for tokens, _, _ in group]
        return self.times * sum(lengths) / len(lengths)

    def answer(self, prompt: int, seed: int, member: int) -> Answer:
        """See `Lengths`."""
        group = self._at(prompt) if self.in_order else self.groups[int(uniform(prompt, 2) * len(self.groups))]
        tokens, own_from, _ = group[member % len(group)]
        length = max(1, round(self.times * tokens))
        if self.apart:
            return Answer(length)
        return Answer(length, round(self.times * own_from), member % len(group) == 0)

    def coarse(self, grain: int) -> Recorded:
        """See `Lengths`."""
        return replace(self, times=self.times / grain)

    def is_trained(self, order: int) -> bool:
        """True if the rewards of the group at this place differ."""
        return len({reward for _, _, reward in self._at(order)}) > 1

    def _at(self, order: int) -> tuple[tuple[int, int, float], ...]:
        count = len(self.groups)
        return self.groups[order if order < count else -1 - (order - count) % count]

    @staticmethod
    def of_places(groups: Mapping[int, Sequence[tuple[int, int, float]]]) -> Recorded:
        """Return the groups in order; a place whose group is unknown gets the previous one."""
        found = [tuple(groups[min(groups)])]
        for place in range(1, max(groups) + 1):
            found.append(tuple(groups[place]) if place in groups else found[-1])
        return Recorded(tuple(found), in_order=True)

    @staticmethod
    def of_run(run_dir: Path, after: int = 0) -> Recorded:
        """Read lengths from a run's kept samples (`samples.every=1`), without its first `after` steps.

        Raises:
            ValueError: the run saved no samples.
        """
        import pyarrow.parquet as pq

        answers: dict[str, list[tuple[list[int], float]]] = {}
        wanted = ["step", "rollout", "sample", "tokens", "loss_mask", "total_reward"]
        for file in sorted((run_dir / "samples").glob("*.parquet")):
            rows = pq.read_table(file, columns=wanted).to_pylist()
            for row in sorted(rows, key=lambda row: int(row["sample"])):
                if row["step"] > after:
                    kept = [token for token, own in zip(row["tokens"], row["loss_mask"], strict=True) if own]
                    answers.setdefault(row["rollout"], []).append((kept, row["total_reward"]))
        if not answers:
            raise ValueError(f"{run_dir} keeps no samples to take lengths from; run it with samples.every=1")
        found = []
        for _, group in sorted(answers.items(), key=lambda item: item[1]):  # ids of rollouts differ from run to run
            parts = zip(parting([tokens for tokens, _ in group]), group, strict=True)
            found.append(tuple((length, own_from, reward) for (length, own_from), (_, reward) in parts))
        return Recorded(tuple(found))

    @staticmethod
    def of_file(file: Path, times: float = 1.0) -> Recorded:
        """Read a file written by `save`."""
        groups = json.loads(file.read_text())
        return Recorded(tuple(tuple((length, own, reward) for length, own, reward in group) for group in groups), times)

    def save(self, file: Path) -> None:
        """Write the groups for `of_file`, without `times`."""
        lines = (json.dumps(group, separators=(",", ":")) for group in self.groups)
        file.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def parting(answers: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return for each answer of a group its length, and the number of first tokens shared with an earlier answer."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for answer in answers:
        prefixes = [tuple(answer[:length]) for length in range(1, len(answer) + 1)]
        found.append((len(answer), sum(prefix in seen for prefix in prefixes)))
        seen.update(prefixes)
    return found
