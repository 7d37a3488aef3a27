"""Rules on a run that makes no step (beside `asyncrl.observe.status`) or did not end normally: where to look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncrl.observe.doctor.finding import Finding, Level, percent
from asyncrl.observe.doctor.measured import policy_of_server
from asyncrl.observe.history import History, Rollout, State
from asyncrl.observe.observer import Activity
from asyncrl.observe.status import LONG_S, SILENT_S, STALLED, WINDOW_S, Launch, stall

SHORT_BEFORE_S = 120.0
"""Longest time between a lack of memory and the end of the run that it causes."""
SCARCE = 0.25
"""Processors are scarce if threads that could run had one for a smaller share of the time. A start on two cores, with
eight processes that import torch, comes near it for some twenty seconds; `LONG_S` must have passed."""


def findings_of_stops(history: History) -> Iterator[Finding]:
    """Yield findings on a run that makes no steps, or that did not end normally."""
    launch = Launch(history.processes)
    if history.state in (State.died, State.stopped):
        failures = _failures(launch)
        if (finding := _out_of_memory(launch)) is not None:
            yield finding
        elif history.state is State.died:
            yield _died(history, launch, failures)
        elif failures:
            yield _failed(history, failures)
    elif history.state is State.running and not launch.step_ends:
        yield _starting(history, launch)
    elif history.state is State.running and (finding := _stalled(history, launch)) is not None:
        yield finding


def without_processors(history: History) -> Iterator[Finding]:
    """Yield a finding if the host has no processor for a run that has too few steps for the rules on its speed."""
    launch = Launch(history.processes)
    workers = launch.processes
    if not workers:
        return
    end = launch.now
    if end - (launch.began_at or min(process.lines[0]["at"] for process in workers)) < LONG_S:
        return
    begin = end - WINDOW_S
    had = sum(process.rate("cpu_s", begin, end) or 0.0 for process in workers)
    lacked = sum(process.rate("no_core_s", begin, end) or 0.0 for process in workers)
    if lacked < 1.0 or had > SCARCE * (had + lacked):
        return
    yield Finding(
        "no-cpu",
        Level.bottleneck,
        "A host without free processors",
        f"in the last {WINDOW_S:.0f} s the run's threads had a processor {percent(had / (had + lacked))} of the time "
        "in which they could run.",
        "Other processes take the host's cores: run fewer of them, or use more cores.",
    )


def _starting(history: History, launch: Launch) -> Finding:
    waiting = [p.name for p in launch.processes if p.activity is Activity.works and not p.last.get("ended")]
    silent = [*launch.silent, *_never_heard_of(history, launch)]
    waiting += [name for name in silent if name not in waiting]
    sentence = f"the run continues after step {max(history.steps)}: " if history.steps else ""
    sentence += f"{launch.describe()}."
    return Finding(
        "no-step-yet",
        Level.notice,
        "No train step yet",
        sentence + (f" Silent: {', '.join(silent)}." if silent else ""),
        f"The others wait for {', '.join(waiting)}; see its log." if waiting and len(waiting) <= 3 else "",
    )


def _never_heard_of(history: History, launch: Launch) -> list[str]:
    """Return the run's servers and RolloutWorkers that wrote nothing, although the others did some seconds ago."""
    heard = [process.name for process in launch.processes]
    begun = min((process.last["since"] for process in launch.processes), default=launch.now)
    if launch.now - begun <= SILENT_S:
        return []
    expected = {"generation_server": "generation.servers", "rollout_worker": "rollout.workers"}
    named = [f"{kind}/{n}" for kind, setting in expected.items() for n in range(int(history.setting(setting) or 0))]
    return [name for name in (*named, *policy_of_server(history)) if name not in heard]


def _stalled(history: History, launch: Launch) -> Finding | None:
    if (found := stall(launch)) is None:
        return None
    sentence, advice = found
    if (oldest := _longest_under_way(history)) is not None:
        sentence += (
            f" The rollout of prompt {oldest.prompt} on {oldest.worker} has been under way for "
            f"{history.now - oldest.admitted_at:.0f} s, longer than any other."
        )
        if not launch.silent:
            advice = f"Look at the log of {oldest.worker}; rollout.rollout_timeout_s ends rollouts that take too long."
    return Finding("stalled", Level.problem, STALLED, sentence, advice)


def _longest_under_way(history: History) -> Rollout | None:
    """Return the longest running rollout, for which a step may wait."""
    under_way = [each for each in history.rollouts.values() if each.finished_at is None and each.end is None]
    return min(under_way, key=lambda each: each.admitted_at, default=None)


def _failures(launch: Launch) -> list[str]:
    """Return why processes of the newest launch failed, the first one first."""
    failed = [process for process in launch.processes if "failed" in process.last]
    return [f"{each.name} failed: {each.last['failed']}" for each in sorted(failed, key=lambda each: each.last["at"])]


def _out_of_memory(launch: Launch) -> Finding | None:
    """Return the finding if a process lacked memory just before the first one failed."""
    failed_at = min((process.last["at"] for process in launch.processes if "failed" in process.last), default=None)
    for process in launch.processes:
        short = process.last.get("shortage")
        if short is None or failed_at is None or abs(failed_at - short["at"]) > SHORT_BEFORE_S:
            continue
        what, advice = short["what"], short["advice"]
        return Finding(
            "out-of-memory",
            Level.problem,
            "The run ran out of memory",
            f"{'' if process.name in what else f'{process.name}: '}{what}.",
            f"{advice[:1].upper()}{advice[1:]}. The same command then continues from the newest checkpoint.",
        )
    return None


def _failed(history: History, failures: Sequence[str]) -> Finding:
    return Finding(
        "failed",
        Level.problem,
        "A process failed",
        f"after step {max(history.steps, default=0)} {failures[0].splitlines()[0]}.",
        "Its log has all of the message. The same command continues from the newest checkpoint.",
    )


def _died(history: History, launch: Launch, failures: Sequence[str]) -> Finding:
    failed = "".join(f"{failure.splitlines()[0]}. " for failure in failures[:1])
    last = ", ".join(
        f"{process.name} {process.last['stage']}" for process in launch.processes if not process.last.get("ended")
    )
    reached = f"after step {max(history.steps)}" if history.steps else "before its first step"
    restarts = history.restarts[-1:]
    return Finding(
        "died",
        Level.problem,
        "The run ended without a summary",
        f"{reached}. {failed}"
        + (f"Last seen: {last}. " if last else "")
        + (
            f"The last restart was of {restarts[0]['restarted']}, which {restarts[0].get('reason', '')}."
            if restarts and "restarted" in restarts[0]
            else ""
        ),
        "The same command continues from the newest checkpoint; the logs of the processes named say why.",
    )
