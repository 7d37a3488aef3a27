"""The run's tables, compared with the ledger: rows of metrics with its steps, kept samples with its rollouts.

Rows of metrics are also compared with the evaluations in the run's summary, kept samples (`docs/samples.md`) by numbers
of samples and tokens and by rewards. Kept samples need pyarrow, as their files do.

If several policies are trained, three counts of the tokens of each must agree. Kept samples have their policy in the
name of their file.

- Generated: tokens from its servers for a rollout, which the RolloutWorker counts as answers arrive.
- Sampled: tokens of the rollout's samples that belong to it by their comparison groups.
- Trained: tokens that the ranks trained it on, in the row of the step.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from asyncrl.comm.ended_rollouts import Trained
from asyncrl.observe.samples import TOKEN_SCORES, per_token_columns
from asyncrl.observe.tail import Appended
from asyncrl.verify.audit.ledger_files import Outcome, Report, StepTotals
from asyncrl.verify.audit.run_files import CheckpointState, Settings, Summary, one_line

_TOLERANCE = 1e-6
"""Relative tolerance, since sums are computed in another order."""
_SUMMARY = "summary.json"
_DROPPED = "rollout/dropped_"
_OWN = "actor"
"""Name of the run's own policy."""
Row: TypeAlias = tuple[str, dict[str, Any]]
"""A row of metrics and its place."""


def check_metrics(
    file: Path, checkpoints: Path, settings: Settings | None, summary: Summary | None, outcome: Outcome, report: Report
) -> None:
    """Check that the rows have no gap, reach the last step, and agree with the ledger's lines."""
    if not file.is_file():
        report(file.name, "is not there")
        return
    written = [*_written_rows(file, report)]
    newest = written[-1][1]["step"] if written else -1
    held = [] if summary is None or summary.steps >= summary.total_steps else held_rows(checkpoints, outcome)
    rows = written + [(location, row) for location, row in held if row["step"] > newest]
    last: int | None = None
    for location, row in rows:
        step, version = row["step"], row["policy_version"]
        if step != version:
            report(location, f"the row of step {step} is of policy version {version}")
        if (last is None and step not in (0, 1)) or (last is not None and step != last + 1):
            report(location, f"the row of step {step} comes after {'nothing' if last is None else f'that of {last}'}")
        last = step
        if step in outcome.steps:
            _check_row(location, row, outcome.steps[step], report)
            _check_drops(location, row, outcome, report)
    _check_end(file.name, -1 if last is None else last, settings, outcome, report)
    if summary is not None and outcome.ended:
        _check_evaluations(file.name, rows, outcome, summary, report)


def held_rows(checkpoints: Path, outcome: Outcome) -> list[Row]:
    """Return the rows in the last checkpoint of a run that was stopped.

    They belong to versions that wait for their evaluation, and to later ones. A complete run has written all of its
    rows. Errors of the checkpoint itself are reported by the check of checkpoints.
    """
    folder = checkpoints / f"v{outcome.version}"
    try:
        held = CheckpointState.read(folder).master_state.metrics_log.rows
        return [(f"{checkpoints.name}/{folder.name}", _checked({"step": each["step"]} | each["row"])) for each in held]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []


def _written_rows(file: Path, report: Report) -> Iterator[Row]:
    for number, raw in enumerate(Appended(file).read(), 1):
        location = f"{file.name}:{number}"
        try:
            yield location, _checked(json.loads(raw))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            report(location, f"not a row of metrics: {one_line(error)}")


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    """Return `row`; raises KeyError or TypeError if it lacks a field that every row has."""
    for name in ("step", "policy_version"):
        if type(row[name]) is not int:
            raise TypeError(f"{name} is {row[name]!r:.50}")
    return row


def _check_row(location: str, row: Mapping[str, Any], totals: StepTotals, report: Report) -> None:
    samples = max(1, totals.samples)
    means = {
        "reward/mean": totals.reward / max(1, totals.episodes),
        "rollout/samples_per_episode": totals.samples / max(1, totals.episodes),
        "rollout/len_mean": totals.tokens / samples,
        "staleness/mean": totals.ages / max(1, totals.young_tokens),
        "staleness/max": float(totals.oldest_age),
        "tokens/trained": float(totals.young_tokens),
        "data/epoch": float(totals.newest_epoch),
    }
    if totals.whole_tokens is not None:
        means["tokens/batch"] = totals.whole_tokens
        means["rollout/context_len_mean"] = (totals.whole_tokens - totals.tokens) / samples
    for name, value in means.items():
        if not _close(recorded := row.get(name), value):
            report(location, f"step {row['step']} has {name} {recorded}, its rollouts in the ledger have {value:.6g}")
    for wrong in _wrong_row(row, totals):
        report(location, wrong)


def _wrong_row(row: Mapping[str, Any], totals: StepTotals) -> Iterator[str]:
    """Yield a message for each policy whose number of trained tokens differs from that of the step's rollouts.

    A policy that the step does not train (`train_every`) has no count in the row. Tokens that are too old count only in
    the ledger (`on_stale=mask`).
    """
    for policy, tokens in totals.policy_tokens.items():
        if policy == _OWN or (recorded := row.get(f"policy/{policy}/tokens/trained")) is None:
            continue
        masked = totals.tokens - totals.young_tokens
        if not tokens - masked <= recorded <= tokens:
            yield f"step {row['step']} trained policy {policy!r} on {recorded:g} tokens, the ledger has {tokens}"


def _check_drops(location: str, row: Mapping[str, Any], outcome: Outcome, report: Report) -> None:
    """Check the drops since the previous step that someone has to look into, by the rollout counts of both steps."""
    now, before = (outcome.counts_at.get(row["step"] - back) for back in (0, 1))
    if now is None or before is None:
        return
    for name, recorded in row.items():
        reason = name.removeprefix(_DROPPED)
        if reason == name:
            continue
        if not _close(recorded, added := now.dropped.get(reason, 0) - before.dropped.get(reason, 0)):
            report(location, f"step {row['step']} has {name} {recorded}, the rollout counts of the ledger {added}")


def _check_end(location: str, last: int, settings: Settings | None, outcome: Outcome, report: Report) -> None:
    """Check the last row. Rows of a run that still runs, or was killed, may wait for an evaluation."""
    if last > outcome.version + (not outcome.ended):
        report(location, f"has a row of step {last}; the ledger's last step is {outcome.version}")
    if last >= outcome.version or not outcome.version:
        return
    if outcome.is_over:
        report(location, f"ends with step {last}; the run ended at {outcome.version}")
    elif settings is not None and not settings.eval.is_due(last + 1, settings.total_train_steps):
        report(
            location,
            f"ends with step {last}; the ledger's last step is {outcome.version}, and version {last + 1} waits for no "
            "evaluation",
        )


def _check_evaluations(location: str, rows: list[Row], outcome: Outcome, summary: Summary, report: Report) -> None:
    """Check that rows and summary have the same evaluations."""
    recorded: dict[Any, dict[str, Any]] = {}
    newest: dict[str, dict[str, Any]] = {}
    for evaluation in summary.evaluations:
        version = evaluation.get("version")
        recorded.setdefault(version, {}).update(evaluation)
        for name in evaluation.keys() - {"version"}:
            figures = newest.setdefault(name.split("/")[1] if "/" in name else name, {})
            if figures.get("version") != version:
                figures.clear()
            figures |= {"version": version, name.split("/", 2)[-1]: evaluation[name]}
    if summary.eval != newest:
        report(_SUMMARY, f"has {summary.eval} as the newest evaluations, and {newest} among all of them")
    failed = {(each.get("version"), each.get("set")) for each in summary.evaluations_failed}
    for where, row in rows:
        measured = {name: value for name, value in row.items() if name.startswith("eval/")}
        row_figures = recorded.pop(row["step"], {})
        for name in sorted(measured.keys() | row_figures.keys() - {"version"}):
            if name.endswith(("/failed", "/cut_short")):
                if (row["step"], name.split("/")[1]) not in failed:
                    report(where, f"has {name}, and {_SUMMARY} no such failure")
            elif not _close(measured.get(name), row_figures.get(name)):
                report(where, f"has {name} {measured.get(name)}, {_SUMMARY} {row_figures.get(name)}")
    last = rows[-1][1]["step"] if rows else -1
    for version in recorded:  # a row that is still held may have its evaluation
        if not isinstance(version, int) or not last < version <= outcome.version:
            report(_SUMMARY, f"has an evaluation of version {version}, and {location} has none")


def _close(one: Any, other: Any) -> bool:
    if not isinstance(one, int | float) or not isinstance(other, int | float):
        return False
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE) or (math.isnan(one) and math.isnan(other))


_COLUMNS = {
    *("step", "rollout", "prompt", "order", "sample", "episode", "total_reward", "staleness", "segments"),
    *("tokens", "loss_mask", "versions", "behave_logprobs", *TOKEN_SCORES, "token_rewards"),
}
"""Columns that files of every version have."""
_NOT_IN_ALL = ("token_columns", "pictures", "group")
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


def _read(file: Path, location: str, report: Report) -> _Rows | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file, use_threads=False)
        if missing := sorted(_COLUMNS - {*table.column_names}):
            report(location, f"has no column {missing[0]}")
            return None
        read = _COLUMNS.union(per_token_columns(), _NOT_IN_ALL)  # the texts are not checked
        rows: _Rows = table.select([name for name in table.column_names if name in read]).to_pylist()
        return rows
    except (OSError, ValueError, pa.ArrowException) as error:
        report(location, f"is not a file of samples: {one_line(error)}")
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
        head, policy = _head_and_policy(file)
        self._files.add((head, policy))
        for row in rows:
            self._head[row["rollout"]] = head
            self.rollouts[row["rollout"]].setdefault(policy, []).append(row)
            if wrong := _wrong_with(row):
                self._report(
                    self._location(head, policy), f"sample {row['sample']} of rollout {row['rollout']}: {wrong}"
                )

    def check(self) -> None:
        """Compare the rollouts with the ledger; only policy by policy if another policy's file is missing."""
        for rollout, parts in self.rollouts.items():
            trained, head = self._outcome.rollouts.get(rollout), self._head[rollout]
            location = self._location(head, next(iter(parts)))
            if trained is None or trained.step != self._step:
                self._report(location, f"rollout {rollout} was not trained at step {self._step}")
                continue
            policies = [policy for policy, share in trained.policies.items() if share.samples]
            for policy in sorted({*policies, *parts}) if policies else ():
                if (head, policy) in self._files:
                    self._check_policy(self._location(head, policy), policy, parts.get(policy, []), trained)
            if all(policy in parts for policy in policies):
                self._check_rollout(location, [*parts.values()], trained)

    def _location(self, head: str, policy: str) -> str:
        return f"{self._folder}/step-{self._step:08d}.{head}{'' if policy == _OWN else f'-{policy}'}.parquet"

    def _check_policy(self, location: str, policy: str, rows: _Rows, trained: Trained) -> None:
        """Check that the rows are samples of the file's policy, as many as in the ledger."""
        if strange := _strangers({row.get("group") or "" for row in rows}, policy, trained.policies):
            self._report(
                location,
                f"rollout {trained.rollout} has samples of the comparison group {strange[0]!r}, and policy {policy!r} "
                "was trained on them",
            )
        found = (sum(sum(row["loss_mask"]) for row in rows), len(rows))
        share = trained.policies.get(policy)
        if share is None or found != (share.trained, share.samples):
            recorded = f"{share.trained} in {share.samples}" if share else "no such policy"
            self._report(
                location,
                f"rollout {trained.rollout} has {found[0]} tokens in {found[1]} samples, the ledger {recorded}",
            )

    def _check_rollout(self, location: str, parts: Sequence[_Rows], trained: Trained) -> None:
        """Check the rows of a rollout whose files are complete; `parts` has the rows of each policy."""
        rollout, samples = trained.rollout, [row for part in parts for row in part]
        numbers = [number for part in parts[:-1] for number in range(len(part))]
        numbers += range(trained.samples - len(numbers))
        recorded = {
            "step": [self._step] * trained.samples,
            "prompt": [trained.prompt] * trained.samples,
            "order": [trained.order] * trained.samples,
            "sample": numbers,
        }
        for name, values in recorded.items():
            if (found := [row[name] for row in samples]) != values:
                self._report(location, f"rollout {rollout} has {name} {found}, the ledger {values}")
        versions = Counter(version for row in samples for version in row["versions"] if version >= 0)
        if versions != trained.versions:
            self._report(
                location, f"rollout {rollout} has tokens {dict(versions)} by version, the ledger {trained.versions}"
            )
        tokens, known = sum(len(row["tokens"]) for row in samples), self._outcome.tokens
        if tokens != known.get(rollout, tokens):
            self._report(location, f"rollout {rollout} has {tokens} tokens, the ledger {known[rollout]}")
        if not _same_reward(samples, trained.episodes, trained.reward):
            self._report(
                location,
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


def _check_all_there(location: str, step: int, every: int, kept: set[str], outcome: Outcome, report: Report) -> None:
    """Check that a step of the last launch, all of whose files exist, saved the samples that its settings require."""
    stray = [name for name in sorted(kept & outcome.rollouts.keys()) if outcome.rollouts[name].order % every]
    if stray:
        report(location, f"has {len(stray)} rollouts that samples.every={every} does not keep, for example {stray[0]}")
    missing = [
        rollout
        for rollout, line in outcome.rollouts.items()
        if line.step == step and line.order % every == 0 and rollout not in kept
    ]
    if missing:
        report(
            location, f"lacks {len(missing)} of the rollouts that samples.every={every} keeps, for example {missing[0]}"
        )


def _head_and_policy(file: str) -> tuple[str, str]:
    """Return the writer and the policy of a file of kept samples: of `step-00000001.head-0-judge.parquet`, `head-0` and
    `judge`.
    """
    kind, _, rest = file.split(".")[1].partition("-")
    number, _, policy = rest.partition("-")
    return f"{kind}-{number}", policy or _OWN


def _strangers(groups: Collection[str], policy: str, policies: Collection[str]) -> list[str]:
    """Return the comparison groups of `groups` whose samples belong to another one of `policies`."""
    roles = {group: group.partition("/")[0] for group in groups}
    return sorted(group for group, role in roles.items() if (role if role in policies else _OWN) != policy)
