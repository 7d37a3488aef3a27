"""Kept samples (`docs/samples.md`), compared with the ledger: rollouts, numbers of samples and tokens, rewards.

It needs pyarrow, as the files do.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.comm.ended_rollouts import Trained
from asyncrl.observe.samples import TOKEN_SCORES, per_token_columns
from asyncrl.verify.audit.ledger_files import Report
from asyncrl.verify.audit.outcome import Outcome
from asyncrl.verify.audit.policy_checks import OWN, head_and_policy, strangers
from asyncrl.verify.audit.run_files import Settings, one_line

_COLUMNS = {
    *("step", "rollout", "prompt", "order", "sample", "episode", "total_reward", "staleness", "segments"),
    *("tokens", "loss_mask", "versions", "behave_logprobs", *TOKEN_SCORES, "token_rewards"),
}
"""Columns that files of every version have."""
_NOT_IN_ALL = ("token_columns", "pictures", "group")
_TOLERANCE = 1e-6
_Rows = list[dict[str, Any]]


def check_samples(
    folder: Path, files: Iterable[Path], settings: Settings | None, outcome: Outcome, report: Report, note: Report
) -> None:
    """Check the kept samples in `files`, which were in `folder` before the ledger was read.

    Steps without a file are noted, not reported. `samples.max_gb` removes the oldest files, an earlier launch may have
    kept no samples, and a killed process may not have written the last ones.
    """
    by_step: dict[int, list[Path]] = defaultdict(list)
    for file in files:
        number, _, writer = file.name.removeprefix("step-").partition(".")
        if number.isdecimal() and writer:
            by_step[int(number)].append(file)
        else:
            report(
                f"{folder.name}/{file.name}",
                "is not a file name of kept samples; expected step-<step>.<writer>.parquet",
            )
    if by_step and importlib.util.find_spec("pyarrow") is None:
        note(folder.name, "is not checked: pyarrow is not installed (pip install 'asyncrl[data]')")
        return
    every = settings.samples.every if settings is not None else 0
    if gone := _without_files(every, by_step.keys(), outcome):
        note(
            folder.name,
            f"has no file of {len(gone)} steps whose samples samples.every={every} keeps, as {gone[0]} (the oldest are "
            "removed beyond samples.max_gb)",
        )
    writers = {file.name.partition(".")[2] for parts in by_step.values() for file in parts}
    for step, parts in sorted(by_step.items()):
        kept = _KeptStep(folder.name, step, outcome, report)
        whole = True
        for file in parts:
            rows = _read(file, f"{folder.name}/{file.name}", report)
            whole &= rows is not None
            if step > outcome.version + (not outcome.ended):
                report(f"{folder.name}/{file.name}", f"no step made it; the last was {outcome.version}")
            elif rows is not None and step <= outcome.version:
                kept.take(file.name, rows)
        kept.check()
        if whole and every > 0 and step > outcome.begun and len(parts) == len(writers):
            _check_all_there(f"{folder.name}/step-{step:08d}", step, every, {*kept.rollouts}, outcome, report)


def _read(file: Path, place: str, report: Report) -> _Rows | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file, use_threads=False)
        if missing := sorted(_COLUMNS - {*table.column_names}):
            report(place, f"has no column {missing[0]}")
            return None
        read = _COLUMNS.union(per_token_columns(), _NOT_IN_ALL)  # the texts are not checked
        rows: _Rows = table.select([name for name in table.column_names if name in read]).to_pylist()
        return rows
    except (OSError, ValueError, pa.ArrowException) as error:
        report(place, f"is not a file of samples: {one_line(error)}")
        return None


class _KeptStep:
    """The kept samples of one step, by rollout and policy. Each policy has separate files.

    Args:
        folder: name of the folder, for findings.
    """

    def __init__(self, folder: str, step: int, outcome: Outcome, report: Report) -> None:
        self._folder, self._step, self._outcome, self._report = folder, step, outcome, report
        self.rollouts: dict[str, dict[str, _Rows]] = defaultdict(dict)
        """By rollout and policy, the rows."""
        self._head: dict[str, str] = {}
        self._files: set[tuple[str, str]] = set()

    def take(self, file: str, rows: _Rows) -> None:
        """Add the rows of a file and check each row."""
        head, policy = head_and_policy(file)
        self._files.add((head, policy))
        for row in rows:
            self._head[row["rollout"]] = head
            self.rollouts[row["rollout"]].setdefault(policy, []).append(row)
            if wrong := _wrong_with(row):
                self._report(self._place(head, policy), f"sample {row['sample']} of rollout {row['rollout']}: {wrong}")

    def check(self) -> None:
        """Compare the rollouts with the ledger; only policy by policy if another policy's file is missing."""
        for rollout, parts in self.rollouts.items():
            trained, head = self._outcome.rollouts.get(rollout), self._head[rollout]
            place = self._place(head, next(iter(parts)))
            if trained is None or trained.step != self._step:
                self._report(place, f"rollout {rollout} was not trained at step {self._step}")
                continue
            policies = [policy for policy, share in trained.policies.items() if share.samples]
            for policy in sorted({*policies, *parts}) if policies else ():
                if (head, policy) in self._files:
                    self._check_policy(self._place(head, policy), policy, parts.get(policy, []), trained)
            if all(policy in parts for policy in policies):
                self._check_rollout(place, [*parts.values()], trained)

    def _place(self, head: str, policy: str) -> str:
        return f"{self._folder}/step-{self._step:08d}.{head}{'' if policy == OWN else f'-{policy}'}.parquet"

    def _check_policy(self, place: str, policy: str, rows: _Rows, trained: Trained) -> None:
        """Check that the rows are samples of the file's policy, as many as in the ledger."""
        if strange := strangers({row.get("group") or "" for row in rows}, policy, trained.policies):
            self._report(
                place,
                f"rollout {trained.rollout} has samples of the comparison group {strange[0]!r}, and policy {policy!r} "
                "was trained on them",
            )
        found = (sum(sum(row["loss_mask"]) for row in rows), len(rows))
        share = trained.policies.get(policy)
        if share is None or found != (share.trained, share.samples):
            told = f"{share.trained} in {share.samples}" if share else "no such policy"
            self._report(
                place, f"rollout {trained.rollout} has {found[0]} tokens in {found[1]} samples, the ledger {told}"
            )

    def _check_rollout(self, place: str, parts: Sequence[_Rows], trained: Trained) -> None:
        """Check the rows of a rollout whose files are complete; `parts` has the rows of each policy."""
        rollout, samples = trained.rollout, [row for part in parts for row in part]
        numbers = [number for part in parts[:-1] for number in range(len(part))]
        numbers += range(trained.samples - len(numbers))
        told = {
            "step": [self._step] * trained.samples,
            "prompt": [trained.prompt] * trained.samples,
            "order": [trained.order] * trained.samples,
            "sample": numbers,
        }
        for name, values in told.items():
            if (found := [row[name] for row in samples]) != values:
                self._report(place, f"rollout {rollout} has {name} {found}, the ledger {values}")
        versions = Counter(version for row in samples for version in row["versions"] if version >= 0)
        if versions != trained.versions:
            self._report(
                place, f"rollout {rollout} has tokens {dict(versions)} by version, the ledger {trained.versions}"
            )
        tokens, known = sum(len(row["tokens"]) for row in samples), self._outcome.tokens
        if tokens != known.get(rollout, tokens):
            self._report(place, f"rollout {rollout} has {tokens} tokens, the ledger {known[rollout]}")
        if not _same_reward(samples, trained.episodes, trained.reward):
            self._report(
                place,
                f"rollout {rollout} does not have the reward {trained.reward:.6g} over {trained.episodes} episodes",
            )


def _wrong_with(row: Mapping[str, Any]) -> str | None:
    """Describe a contradiction within a row; None if the row is consistent."""
    length = len(row["tokens"])
    columns = {name: row.get(name) for name in per_token_columns()} | dict(row.get("token_columns") or ())
    for name, values in columns.items():
        if values is not None and len(values) != length:
            return f"{name} has {len(values)} values for {length} tokens"
    generated = [version for version in row["versions"] if version >= 0]
    if [version >= 0 for version in row["versions"]] != [mask != 0 for mask in row["loss_mask"]]:
        return "versions and loss_mask do not mark the same tokens"
    staleness = row["step"] - 1 - min(generated) if generated else None
    if row["staleness"] != staleness:
        return f"staleness is {row['staleness']}, its tokens are of staleness {staleness}"
    logprobs = zip(row["behave_logprobs"], row["versions"], strict=True)
    if any(value != 0.0 and version < 0 for value, version in logprobs):
        return "behave_logprobs has values where nothing was generated"
    pictures = [(each["position"], each["position"] + each["length"]) for each in row.get("pictures") or ()]
    if _segments(row["versions"], pictures) != [
        (each["start"], each["stop"], each["version"] if each["generated"] else -1) for each in row["segments"]
    ]:
        return "segments are not those of its tokens"
    return None


def _segments(versions: Sequence[int], pictures: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return first and last position and version of each segment; the spans in `pictures` are separate segments."""
    changes = {at for at in range(1, len(versions)) if versions[at] != versions[at - 1]}
    bounds = sorted(changes | {at for span in pictures for at in span if 0 < at < len(versions)})
    starts = [0, *bounds]
    return [(start, stop, versions[start]) for start, stop in zip(starts, [*bounds, len(versions)], strict=True)]


def _same_reward(samples: _Rows, episodes: int, reward: float) -> bool:
    by_episode: dict[int, list[float]] = defaultdict(list)
    for row in samples:
        by_episode[row["episode"]].append(row["total_reward"])
    means = [sum(rewards) / len(rewards) for rewards in by_episode.values()]
    mean = sum(means) / max(1, len(means))
    return len(means) == episodes and math.isclose(mean, reward, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _without_files(every: int, steps: Collection[int], outcome: Outcome) -> list[int]:
    """Return the steps that should have a file of samples but have none; without the last steps of a run that may
    continue.
    """
    last = outcome.version if outcome.is_over else outcome.version - 2
    wanted = {line.step for line in outcome.rollouts.values() if every and line.order % every == 0}
    return sorted(step for step in wanted - set(steps) if step <= last)


def _check_all_there(place: str, step: int, every: int, kept: set[str], outcome: Outcome, report: Report) -> None:
    """Check that a step of the last launch, all of whose files exist, saved the samples that its settings require."""
    stray = [name for name in sorted(kept & outcome.rollouts.keys()) if outcome.rollouts[name].order % every]
    if stray:
        report(place, f"has {len(stray)} rollouts that samples.every={every} does not keep, for example {stray[0]}")
    missing = [
        rollout
        for rollout, line in outcome.rollouts.items()
        if line.step == step and line.order % every == 0 and rollout not in kept
    ]
    if missing:
        report(
            place, f"lacks {len(missing)} of the rollouts that samples.every={every} keeps, for example {missing[0]}"
        )
