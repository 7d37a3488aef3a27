"""Kept samples (`docs/samples.md`), compared with the ledger: rollouts, numbers of samples and tokens, rewards.

It needs pyarrow, as the files do.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.verify.audit.documents import Settings, one_line
from asyncrl.verify.audit.history import Report
from asyncrl.verify.audit.outcome import Outcome

_COLUMNS = ("step", "rollout", "prompt", "order", "sample", "episode", "total_reward", "staleness", "segments")
_ALIGNED = ("tokens", "loss_mask", "versions", "behave_logprobs")
_SCORES = ("prox_logprobs", "ref_logprobs", "advantages", "token_rewards")
_TOLERANCE = 1e-6
_Rows = list[dict[str, Any]]


def check_samples(
    folder: Path, files: Iterable[Path], settings: Settings | None, outcome: Outcome, report: Report, note: Report
) -> None:
    """Check the kept samples in `files`, which were in `folder` before the ledger was read."""
    by_step: dict[int, list[Path]] = defaultdict(list)
    for file in files:
        number, _, writer = file.name.removeprefix("step-").partition(".")
        if number.isdecimal() and writer:
            by_step[int(number)].append(file)
        else:
            report(f"{folder.name}/{file.name}", "is not named as kept samples are: step-<step>.<writer>.parquet")
    if by_step and importlib.util.find_spec("pyarrow") is None:
        note(folder.name, "is not checked: pyarrow is not installed (pip install 'asyncrl[data]')")
        return
    writers = {file.name.partition(".")[2] for parts in by_step.values() for file in parts}
    begun = outcome.begun[-1] if outcome.begun else 0
    for step, parts in sorted(by_step.items()):
        kept: set[str] = set()
        whole = True
        for file in parts:
            rows = _read(file, f"{folder.name}/{file.name}", report)
            whole &= rows is not None
            if step > outcome.version + (not outcome.ended):
                report(f"{folder.name}/{file.name}", f"no step made it; the last was {outcome.version}")
            elif rows is not None and step <= outcome.version:
                kept |= _check_file(f"{folder.name}/{file.name}", step, rows, outcome, report)
        every = settings.samples.every if settings is not None else 0
        if whole and every > 0 and step > begun and len(parts) == len(writers):
            _check_all_there(f"{folder.name}/step-{step:08d}", step, every, kept, outcome, report)


def _read(file: Path, place: str, report: Report) -> _Rows | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file, use_threads=False)
        if missing := sorted({*_COLUMNS, *_ALIGNED, *_SCORES} - {*table.column_names}):
            report(place, f"has no column {missing[0]}")
            return None
        pictures = {"pictures"} & {*table.column_names}  # files of earlier versions have none
        rows: _Rows = table.select([*_COLUMNS, *_ALIGNED, *_SCORES, *pictures]).to_pylist()
        return rows
    except (OSError, ValueError, pa.ArrowException) as error:
        report(place, f"is no file of samples: {one_line(error)}")
        return None


def _check_file(place: str, step: int, rows: _Rows, outcome: Outcome, report: Report) -> set[str]:
    """Check the rows of one file; return the rollouts in it."""
    by_rollout: dict[str, _Rows] = defaultdict(list)
    for row in rows:
        by_rollout[row["rollout"]].append(row)
        if wrong := _wrong_with(row):
            report(place, f"sample {row['sample']} of rollout {row['rollout']}: {wrong}")
    for rollout, samples in by_rollout.items():
        trained = outcome.rollouts.get(rollout)
        if trained is None or trained.step != step:
            report(place, f"rollout {rollout} was not trained at step {step}")
            continue
        told = {
            "step": [step] * trained.samples,
            "prompt": [trained.prompt] * trained.samples,
            "order": [trained.order] * trained.samples,
            "sample": list(range(trained.samples)),
        }
        for name, values in told.items():
            if (found := [row[name] for row in samples]) != values:
                report(place, f"rollout {rollout} has {name} {found}, the ledger {values}")
        versions = Counter(version for row in samples for version in row["versions"] if version >= 0)
        if versions != trained.versions:
            report(place, f"rollout {rollout} has tokens {dict(versions)} by version, the ledger {trained.versions}")
        tokens = sum(len(row["tokens"]) for row in samples)
        if tokens != outcome.tokens.get(rollout, tokens):
            report(place, f"rollout {rollout} has {tokens} tokens, the ledger {outcome.tokens[rollout]}")
        if not _same_reward(samples, trained.episodes, trained.reward):
            report(place, f"rollout {rollout} has not the reward {trained.reward:.6g} over {trained.episodes} episodes")
    return {*by_rollout}


def _wrong_with(row: Mapping[str, Any]) -> str | None:
    """Describe a contradiction within a row; None if there is none."""
    length = len(row["tokens"])
    for name in (*_ALIGNED, *_SCORES):
        if (values := row[name]) is not None and len(values) != length:
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


def _check_all_there(place: str, step: int, every: int, kept: set[str], outcome: Outcome, report: Report) -> None:
    """Check that a step of the last launch, whose files all exist, saved the samples that its settings ask for."""
    stray = [name for name in sorted(kept & outcome.rollouts.keys()) if outcome.rollouts[name].order % every]
    if stray:
        report(place, f"has {len(stray)} rollouts that samples.every={every} does not keep, as {stray[0]}")
    missing = [
        rollout
        for rollout, line in outcome.rollouts.items()
        if line.step == step and line.order % every == 0 and rollout not in kept
    ]
    if missing:
        report(place, f"has not {len(missing)} of the rollouts that samples.every={every} keeps, as {missing[0]}")
