"""Rules on a run's health: lost rollouts, failing learning, an exploited reward, limits in effect, growing memory.

A reward is exploited if it rises while the evaluation falls: the policy exploits something that only the reward
measures. The evaluations of a set are cut into three equal parts, in order. Of the first two parts, the better one is
compared with the last. The set has fallen if each evaluation of the last part is below each of the better part, and the
mean fell by more than `FALLEN`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from asyncrl.comm.ended_rollouts import DropReason, failure, is_filter_reason
from asyncrl.observe.doctor.finding import Finding, Level
from asyncrl.observe.doctor.measured import WINDOW_STEPS, Measured
from asyncrl.observe.history import History, Row
from asyncrl.observe.metrics.learning import FLAT_STEPS, is_constant, is_flat
from asyncrl.observe.status import Process

FEWEST_EVALUATIONS = 6
FALLEN = 0.1
"""Least mean drop, as a share of the better evaluations' mean."""
RISEN = 0.1
"""Least rise of the batches' rewards meanwhile, as a share of their range."""
NO_PARTS = frozenset({"mean", "std", "min", "max", "frac_zero_std"})
"""Metrics `reward/<name>` that do not measure a part of the reward."""
Point = tuple[int, float]


def exploited_rewards(history: History) -> Iterator[Finding]:
    """Yield a finding for each evaluated set that falls while the reward of the batches rises."""
    rows = [history.rows[step] for step in sorted(history.rows)]
    for name, figure in _figures(rows).items():
        points = [
            (int(row["step"]), float(row[f"eval/{name}/{figure}"])) for row in rows if f"eval/{name}/{figure}" in row
        ]
        if (parts := _fallen(points)) is None:
            continue
        better, last = parts
        before, after = _between(rows, better), _between(rows, last)
        rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
        if not before or not after:
            continue
        risen = _mean_of(after, "reward/mean") - _mean_of(before, "reward/mean")
        if risen <= RISEN * (max(rewards) - min(rewards)):
            continue
        yield Finding(
            "reward-exploited",
            Level.problem,
            "The reward rises and the evaluation falls",
            f"{figure.removesuffix('_mean')} on {name} fell from {fmean(value for _, value in better):.3f} (steps "
            f"{better[0][0]} to {better[-1][0]}) to {fmean(value for _, value in last):.3f} (steps {last[0][0]} to "
            f"{last[-1][0]}), while the reward of the batches rose from {_mean_of(before, 'reward/mean'):.3f} to "
            f"{_mean_of(after, 'reward/mean'):.3f}{_part(before, after)}.",
            f"Look at answers that the reward likes (show RUN --step {last[0][0]}: --reward "
            f"{_mean_of(after, 'reward/mean'):.2g}:); change the reward, or continue from an earlier checkpoint.",
        )


def _figures(rows: Sequence[Row]) -> dict[str, str]:
    """Return the evaluated sets, each with the figure that shows how good the policy is."""
    found: dict[str, str] = {}
    for row in rows:
        for key in row:
            group, _, rest = key.partition("/")
            name, _, figure = rest.rpartition("/")
            if group == "eval" and (figure == "accuracy" or (figure == "reward_mean" and name not in found)):
                found[name] = figure
    return found


def _fallen(points: Sequence[Point]) -> tuple[Sequence[Point], Sequence[Point]] | None:
    """Return the better part and the last part of the evaluations, if they have fallen."""
    third = len(points) // 3
    if len(points) < FEWEST_EVALUATIONS:
        return None
    first, second, last = points[-3 * third : -2 * third], points[-2 * third : -third], points[-third:]
    better = max(first, second, key=lambda part: fmean(value for _, value in part))
    falls = min(value for _, value in better) > max(value for _, value in last)
    before, after = (fmean(value for _, value in part) for part in (better, last))
    return (better, last) if falls and before - after > FALLEN * abs(before) else None


def _between(rows: Sequence[Row], points: Sequence[Point]) -> list[Row]:
    """Return the steps' rows from the first of `points` to the last."""
    return [row for row in rows if points[0][0] <= row["step"] <= points[-1][0] and "reward/mean" in row]


def _mean_of(rows: Sequence[Row], name: str) -> float:
    return fmean(row[name] for row in rows if name in row)


def _part(before: Sequence[Row], after: Sequence[Row]) -> str:
    """Name the part of the reward that rose most, if it has parts."""
    keys = {key for key in before[-1].keys() & after[-1].keys() if key.count("/") == 1 and key.startswith("reward/")}
    parts = sorted(key for key in keys if key.removeprefix("reward/") not in NO_PARTS)
    if not parts:
        return ""
    most = max(parts, key=lambda key: _mean_of(after, key) - _mean_of(before, key))
    name = most.removeprefix("reward/")
    return f"; of its parts {name} rose most, from {_mean_of(before, most):.3f} to {_mean_of(after, most):.3f}"


FEWEST_ROLLOUTS = 8
MANY_FAILED = 0.1
MANY_STALE = 0.1
NEARLY_ALL = 0.9
RUBRIC_FAILED = "agent/rubric_failed/"
"""Beginning of the metrics by which `verifiers_host` tells of functions of a rubric that raise."""
COLLAPSED = 0.1
"""Share of the first steps' entropy below which the entropy counts as collapsed."""
LOW_ENTROPY = 0.02
"""Entropy in nats per token below which the policy hardly explores."""
FEW_EFFECTIVE = 0.1
WARM_S = 600.0
"""Seconds of a process's life, and time of its memory, before growth counts: caches and an optimizer's state fill."""
WARM_STEPS = 10
SOON_S = 6 * 3600.0
CLOCK_S = 0.1
"""Seconds by which a clock may be off before it is reported."""


def problems(history: History, measured: Measured | None) -> Iterator[Finding]:
    """Yield a finding for each problem and each limit that takes effect silently, the most severe first."""
    rows = [row for _, row in sorted(history.rows.items()) if "reward/mean" in row]
    yield from _damaged(history)
    yield from _drops(history)
    yield from _rubric(rows)
    yield from _learning(history, rows)
    yield from exploited_rewards(history)
    yield from _limits(history, rows, measured)
    for process in history.processes.values():
        if len(rows) >= WARM_STEPS:
            yield from _memory(process)
        yield from _clock(process)


def _damaged(history: History) -> Iterator[Finding]:
    if history.damaged:
        yield Finding(
            "damaged-files",
            Level.problem,
            "Files of the run are damaged",
            f"{'. '.join(history.damaged.values())}.",
            "What they held is left out here.",
        )


def _drops(history: History) -> Iterator[Finding]:
    first = max(1, max(history.steps, default=0) - WINDOW_STEPS + 1)
    admitted, dropped = history.ledger.dropped_since(first)
    failed = {reason: count for reason, count in dropped.items() if count and failure(reason) is not None}
    settings = history.ledger.settings
    eta = settings.max_head_offpolicyness if settings else 0
    if admitted < FEWEST_ROLLOUTS:
        return
    if sum(failed.values()) > MANY_FAILED * admitted:
        reason = max(failed, key=lambda name: failed[name])
        yield Finding(
            "rewards-that-always-fail",
            Level.problem,
            "Rollouts fail",
            f"{sum(failed.values())} of {admitted} rollouts since step {first} failed, {failed[reason]} of them "
            f"{failure(reason)} ({reason}).",
            "The logs of the rollout_workers say why.",
        )
    if (stale := dropped.get(DropReason.stale, 0)) > MANY_STALE * admitted:
        yield Finding(
            "stale-drops",
            Level.problem,
            "Rollouts are dropped as too old",
            f"{stale} of {admitted} rollouts since step {first} were older than η = {eta} allows when their "
            f"turn came, which selects against long answers{_lengths(history, first)}.",
            f"Set on_stale=wait, or max_head_offpolicyness={eta + 1}"
            + (", or rollout.pacing=deadline." if history.setting("rollout.pacing") != "deadline" else "."),
        )
    filtered = {reason: count for reason, count in dropped.items() if is_filter_reason(reason)}
    if sum(filtered.values()) > NEARLY_ALL * admitted:
        reason = max(filtered, key=lambda name: filtered[name])
        yield Finding(
            "filters-drop-nearly-all",
            Level.problem,
            "Filters drop nearly every group",
            f"{sum(filtered.values())} of {admitted} groups since step {first}, most of them as {reason!r}.",
            "The prompts are too easy or too hard for this policy, or the filter is too strict: look at the rewards.",
        )


def _rubric(rows: Sequence[Row]) -> Iterator[Finding]:
    """Yield a finding for each function of a `verifiers` rubric that raises, which the rubric counts as 0."""
    last = rows[-WINDOW_STEPS:]
    for key in sorted({key for row in last for key in row if key.startswith(RUBRIC_FAILED)}):
        share = fmean([row[key] for row in last if key in row])
        if share > MANY_FAILED:
            yield Finding(
                "rubric-fails",
                Level.problem,
                "A function of the rubric fails",
                f"{key.removeprefix(RUBRIC_FAILED)} raised in {share:.0%} of the last episodes, where it counts as 0.",
                "The logs of the rollout_workers have its traceback.",
            )


def _lengths(history: History, first: int) -> str:
    """Return the mean lengths of the answers that were received since step `first` and of those that were trained."""
    rows = [row for step, row in history.rows.items() if step >= first and "rollout/received_len_mean" in row]
    if not rows:
        return ""
    received, trained = (fmean([row[f"rollout/{name}"] for row in rows]) for name in ("received_len_mean", "len_mean"))
    return f" (received ones have {received:.0f} tokens on average, trained ones {trained:.0f})"


def _learning(history: History, rows: Sequence[Row]) -> Iterator[Finding]:
    flat = [row for row in rows[-5 * FLAT_STEPS :] if is_flat(row)]
    if len(flat) >= FLAT_STEPS and len(flat) > 0.8 * len(rows[-5 * FLAT_STEPS :]):
        what = "are all the same" if all(map(is_constant, flat)) else "are equal within each group"
        yield Finding(
            "nothing-learnt",
            Level.problem,
            "Nothing is learnt",
            f"in {len(flat)} of the last {len(rows[-5 * FLAT_STEPS :])} steps the rewards {what} "
            f"(mean {rows[-1]['reward/mean']:.3g}), so every advantage is zero.",
            "Look at the reward function, at how hard the prompts are, and at group_size.",
        )
        return
    entropies = [row["entropy"] for row in rows if "entropy" in row]
    if len(entropies) >= 10:
        fifth = len(entropies) // 5
        first, last = sum(entropies[:fifth]) / fifth, sum(entropies[-fifth:]) / fifth
        if 0 < last < min(COLLAPSED * first, LOW_ENTROPY):
            yield Finding(
                "entropy-collapses",
                Level.problem,
                "The policy's entropy has collapsed",
                f"it fell from {first:.3f} to {last:.4f} nats a token: answers hardly differ any more.",
                "Lower optimizer.lr, raise algorithm.entropy_coef or the clip's upper bound, or stop here.",
            )
    squares = rows[-1].get("ppo/behave_ratio_square_mean") if rows else None
    if squares and squares > 1 / FEW_EFFECTIVE:
        yield Finding(
            "old-data",
            Level.problem,
            "Little of the batch counts",
            f"the effective sample size is {1 / squares:.0%} of the tokens: the policy has moved far from what "
            "generated them.",
            "Lower max_head_offpolicyness or optimizer.lr"
            + (", or use fewer trainer.ppo_epochs." if history.setting("trainer.ppo_epochs", 1) > 1 else "."),
        )


def _limits(history: History, rows: Sequence[Row], m: Measured | None) -> Iterator[Finding]:
    if m is not None and m.eta >= 2 and len(rows) > 5 * m.eta and 0 < m.greatest_age < m.eta / 2:
        yield Finding(
            "eta-never-reached",
            Level.notice,
            "η is never reached",
            f"no token was older than {m.greatest_age:.0f} versions, and {m.eta} are allowed.",
            "It does no harm; more slots (rollout.max_concurrent) or servers would use it.",
        )


def _clock(process: Process) -> Iterator[Finding]:
    """Yield a finding if the clock of the process's host is off, as the staging server there measures it."""
    ahead_s, within_s = process.last.get("clock_ahead_s", 0.0), process.last.get("clock_within_s", 0.0)
    if abs(ahead_s) - within_s <= CLOCK_S:
        return
    yield Finding(
        "clocks-differ",
        Level.notice,
        "A host's clock is off",
        f"the clock of the host of {process.name} is {abs(ahead_s):.2f} s {'ahead of' if ahead_s > 0 else 'behind'} "
        f"that of the launcher's host (to within {within_s:.3f} s).",
        "Times in observed/ are corrected; rollout/transport_s of its rollouts is not. Keep clocks by NTP.",
    )


KEPT_BY = {
    "rollout_worker": "Look for what your agent, environment, reward or tools keep.",
    "master_worker": "Look at the number of rollouts that wait to be trained (buffer/size).",
    "model_worker": "Look for what your losses, statistics or model functions keep.",
}
"""Where to look, by the kind of the process."""


def _memory(process: Process) -> Iterator[Finding]:
    """Yield a finding if the process's memory still grows after its warm-up, evenly, and so fast that its host runs out
    of memory within hours.
    """
    lines = [line for line in process.lines if "rss" in line and line.get("pid") == process.last.get("pid")]
    warm = [line for line in lines if line["at"] >= lines[0]["at"] + WARM_S]
    third = len(warm) // 3
    if third < 2 or warm[-1]["at"] - warm[0]["at"] < WARM_S:
        return
    parts = warm[:third], warm[third:-third], warm[-third:]
    before, grown = (
        min(line["rss"] for line in later) - max(line["rss"] for line in earlier)
        for earlier, later in (parts[:2], parts[1:])
    )
    seconds = fmean([line["at"] for line in parts[2]]) - fmean([line["at"] for line in parts[1]])
    free = process.last.get("host_free", 0)
    if before < 0 or grown < 0 or (rise := _mean_rss(parts[2]) - _mean_rss(parts[1])) <= 0:
        return
    if rise < (_mean_rss(parts[1]) - _mean_rss(parts[0])) / 2 or free / (rise / seconds) > SOON_S:
        return
    yield Finding(
        "memory-grows",
        Level.problem,
        "Memory grows",
        f"{process.name} grew by {rise / 2**20:.0f} MiB in {seconds / 60:.0f} minutes to "
        f"{process.last['rss'] / 2**30:.1f} GiB; at this pace its host's memory is used up in "
        f"{free / (rise / seconds) / 3600:.1f} hours.",
        KEPT_BY.get(process.kind, f"Look at the log of {process.name}."),
    )


def _mean_rss(lines: Sequence[Mapping[str, Any]]) -> float:
    return fmean([line["rss"] for line in lines])
