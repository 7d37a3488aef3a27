"""Rules on a run that makes no step: the processes' activities, their durations, and the process to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from asyncrl.observe.doctor.finding import Finding, Level, percent
from asyncrl.observe.doctor.measured import policy_of_server
from asyncrl.observe.history import History, Process, Rollout, State
from asyncrl.observe.observer import Activity

SILENT_S = 10.0
"""A living process writes every two seconds."""
LONG_S = 60.0
MOST_LINES = 8
TIMES_LATE = 3.0
"""A step that takes so many times as long as others says nothing on the end of the run."""
TELLING = 0.25
"""Share of the first batch from which on the time so far tells how long the rest takes."""
PACE_STEPS = 11
"""Newest steps whose ends tell how long a step takes."""
TIMES_A_STEP = 8.0
WINDOW_S = 60.0
SHORT_BEFORE_S = 120.0
"""Longest time between a lack of memory and the end of the run that it causes."""
SCARCE = 0.25
"""Processors are scarce if threads that could run had one for a smaller share of the time. A start on two cores, with
eight processes that import torch, comes near it for some twenty seconds; `LONG_S` must have passed."""


def findings_of_stops(history: History) -> Iterator[Finding]:
    """Yield findings on a run that makes no steps, or that did not end normally."""
    if history.state in (State.died, State.stopped):
        failures = _failures(history)
        if (finding := _out_of_memory(history)) is not None:
            yield finding
        elif history.state is State.died:
            yield _died(history, failures)
        elif failures:
            yield _failed(history, failures)
    elif history.state is State.running and not _has_stepped(history):
        yield _starting(history)
    elif history.state is State.running and (finding := _stalled(history)) is not None:
        yield finding


def without_processors(history: History) -> Iterator[Finding]:
    """Yield a finding if the host has no processor for a run that has too few steps for the rules on its speed."""
    workers = _workers(history)
    if not workers:
        return
    end = max(process.last["at"] for process in workers)
    if end - (_launched_at(history) or min(process.lines[0]["at"] for process in workers)) < LONG_S:
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


def progress(history: History) -> list[tuple[str, str, float]]:
    """Return the processes that do not just serve: name, stage, and its duration in seconds."""
    now = history.now
    return [
        (process.name, process.last["stage"], max(0.0, now - process.last["since"]))
        for process in _workers(history)
        if process.activity is not Activity.serves and not process.last.get("ended")
    ]


class StatusLine(NamedTuple):
    """A line on the state of a run, and since when it is so, in seconds; None if it has no beginning."""

    text: str
    seconds: float | None = None

    def __str__(self) -> str:
        return self.text if self.seconds is None else f"{self.text} ({self.seconds:.0f} s)"


def status_lines(history: History, verdict: Finding | None) -> list[StatusLine]:
    """Describe the state of a run for the terminal: its processes until this launch has made a step, then the
    bottleneck.
    """
    if _has_stepped(history):
        if verdict is None or verdict.level is Level.remark:
            return []
        stalled = verdict.kind == "stalled"
        what = f"{verdict.sentence} {verdict.advice}" if stalled else verdict.advice or verdict.sentence
        return [StatusLine(f"{verdict.title}: {what} {verdict.gain}".strip())]
    doing = [StatusLine(f"{name} {stage}", seconds) for name, stage, seconds in progress(history)]
    if len(doing) > MOST_LINES:
        doing = [*doing[: MOST_LINES - 1], StatusLine(f"and {len(doing) - MOST_LINES + 1} other processes")]
    return doing or [StatusLine(_all_at_work(history))]


def outlook(history: History) -> str:
    """Return how far the batch at hand is, when it will be complete, and when the run will end, as far as that can be
    told; empty before the first rollout.
    """
    gate = next((process for process in _workers(history) if process.kind == "gserver_manager"), None)
    total, batch = int(history.setting("total_train_steps", 0)), int(history.setting("train_batch_size", 0))
    newest, now = max(history.steps, default=0), history.now
    begun = next((line["at"] for line in gate.lines if line.get("rollouts_running")), None) if gate else None
    if gate is None or begun is None or not batch or newest >= total:
        return ""
    training = any(p.last.get("training") for p in _workers(history) if p.kind == "master_worker")
    ready = min(batch, int(gate.last.get("finished_untrained", 0)))
    what = f"step {newest + 1} of {total}"
    what += " trains" if training else f": {ready} of {batch} rollouts are ready"
    if not _has_stepped(history):
        group = int(history.setting("group_size", 1))
        answers = sum(int(p.last.get("answers_total", 0)) for p in _workers(history) if p.kind == "rollout_worker")
        submitted = max(batch, int(gate.last.get("submitted_total", 0)) - int(gate.last.get("trained_total", 0)))
        share = max(ready / batch, min(0.99, answers / (submitted * group)))
        if training:
            return f"{what}; the first step shows how long the run takes"
        what += f", {answers} answers of at least {batch * group} are complete"
        servers = [p.last for p in _workers(history) if p.kind == "generation_server" and p.last.get("tokens_per_s")]
        if servers:
            what += f"; {sum(each['tokens_per_s'] for each in servers):,.0f} tokens/s"
        at_once = (
            sum(int(each.get("running", 0)) for each in servers) or int(gate.last.get("rollouts_running", 0)) * group
        )
        too_few = share < TELLING and answers < at_once  # answers that began together end together
        if share >= 1.0 or not share or too_few:
            return what
        left_s = (now - begun) * (1.0 - share) / share
        run_s = (left_s + now - begun) * (total - newest)
        return f"{what}; the batch in {about(left_s)}, the run in more than {about(run_s)}"
    ends = [history.steps[number].at for number in sorted(history.steps)[-PACE_STEPS:]]
    ends = [at for at in ends if at >= _launched_at(history)]
    pace_s = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0] - begun
    if (since_s := now - ends[-1]) > TIMES_LATE * pace_s:
        return f"{what}, not complete after {about(since_s)}, where a step takes {about(pace_s)}"
    since_s = min(since_s, pace_s)
    return f"{what}, complete in {about(pace_s - since_s)}; the run in {about((total - newest) * pace_s - since_s)}"


def about(seconds: float) -> str:
    """Return a duration for people, e.g. `about 4 min`."""
    minutes = round(seconds / 60.0)
    if seconds < 90.0:
        return f"about {max(1, round(seconds))} s"
    return f"about {minutes} min" if minutes < 120 else f"about {minutes // 60} h {minutes % 60:02d} min"


def _all_at_work(history: History) -> str:
    if not any(process.kind == "master_worker" for process in _workers(history)):
        return "the processes are starting"
    return "all processes are at work: the first batch is being generated"


def _launched_at(history: History) -> float:
    """Return the time of the newest launch's first line, in seconds since 1970; 0 if launchers wrote none."""
    launcher = history.processes.get("launcher/0")
    if launcher is None or not launcher.lines:
        return 0.0
    return float(next(line["at"] for line in launcher.lines if line["pid"] == launcher.last["pid"]))


def _has_stepped(history: History) -> bool:
    """True if the newest launch has made a train step."""
    return bool(history.steps) and history.steps[max(history.steps)].at >= _launched_at(history)


def _workers(history: History) -> list[Process]:
    """Return the processes of the newest launch."""
    since = _launched_at(history)
    return [
        process
        for process in history.processes.values()
        if process.kind != "launcher" and process.lines and process.last["at"] >= since
    ]


def _doing(history: History) -> str:
    """Return a sentence with the stages of the processes that are not just waiting for requests."""
    parts = [f"{name} {stage} since {seconds:.0f} s" for name, stage, seconds in progress(history)]
    return "; ".join(parts)


def _starting(history: History) -> Finding:
    doing = _doing(history)
    waiting = [p.name for p in _workers(history) if p.activity is Activity.works and not p.last.get("ended")]
    silent = [*_silent(history), *_never_heard_of(history)]
    waiting += [name for name in silent if name not in waiting]
    before = f"the run continues after step {max(history.steps)}: " if history.steps else ""
    return Finding(
        "no-step-yet",
        Level.remark,
        "No train step yet",
        before + (doing or _all_at_work(history)) + "." + (f" Silent: {', '.join(silent)}." if silent else ""),
        f"The others wait for {', '.join(waiting)}; see its log." if waiting and len(waiting) <= 3 else "",
    )


def _silent(history: History) -> list[str]:
    """Return the processes that should still write lines, and have not done so for some seconds."""
    return [p.name for p in _workers(history) if history.now - p.last["at"] > SILENT_S and not p.last.get("ended")]


def _never_heard_of(history: History) -> list[str]:
    """Return the run's servers and RolloutWorkers that wrote nothing, although the others did some seconds ago."""
    heard = {process.name: process for process in _workers(history)}
    begun = min((process.last["since"] for process in heard.values()), default=history.now)
    if history.now - begun <= SILENT_S:
        return []
    expected = {"generation_server": "generation.servers", "rollout_worker": "rollout.workers"}
    named = [f"{kind}/{n}" for kind, setting in expected.items() for n in range(int(history.setting(setting) or 0))]
    return [name for name in (*named, *policy_of_server(history)) if name not in heard]


def _stalled(history: History) -> Finding | None:
    newest = max(history.steps)
    since = history.now - history.steps[newest].at
    times = [row["time/step_s"] for row in history.rows.values() if "time/step_s" in row]
    if since < max(LONG_S, TIMES_A_STEP * (median(times) if times else 0.0)):
        return None
    silent, now = _silent(history), history.now
    recent = [p.rate(work, now - WINDOW_S, now) for p in _workers(history) for work in ("answers_total", "flops_total")]
    if any(recent):  # answers end, or ranks compute: the step is only long
        return None
    doing = _doing(history)
    gate = next((p.last for p in _workers(history) if p.kind == "gserver_manager"), {})
    counters = ""
    if gate:
        counters = (
            f" The manager counts {gate.get('rollouts_running', 0):.0f} rollouts under way and "
            f"{gate.get('finished_untrained', 0):.0f} that wait to be trained."
        )
    advice = f"Look at the log of {silent[0] if silent else 'the process named first'}; py-spy dump shows where it is."
    if (oldest := _longest_under_way(history)) is not None:
        counters += (
            f" The rollout of prompt {oldest.prompt} on {oldest.worker} has been under way for "
            f"{now - oldest.admitted_at:.0f} s, longer than any other."
        )
        if not silent:
            advice = f"Look at the log of {oldest.worker}; rollout.rollout_timeout_s ends rollouts that take too long."
    return Finding(
        "stalled",
        Level.problem,
        "The run stands still",
        f"no step since {since:.0f} s, after step {newest}; {doing or 'all processes wait'}."
        + (f" Silent: {', '.join(silent)}." if silent else "")
        + counters,
        advice,
    )


def _longest_under_way(history: History) -> Rollout | None:
    """Return the longest running rollout, for which a step may wait."""
    under_way = [each for each in history.rollouts.values() if each.finished_at is None and each.end is None]
    return min(under_way, key=lambda each: each.admitted_at, default=None)


def _failures(history: History) -> list[str]:
    """Return why processes of the newest launch failed, the first one first."""
    failed = [process for process in _workers(history) if "failed" in process.last]
    return [f"{each.name} failed: {each.last['failed']}" for each in sorted(failed, key=lambda each: each.last["at"])]


def _out_of_memory(history: History) -> Finding | None:
    """Return the finding if a process lacked memory just before the first one failed."""
    failed_at = min((process.last["at"] for process in _workers(history) if "failed" in process.last), default=None)
    for process in _workers(history):
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


def _died(history: History, failures: Sequence[str]) -> Finding:
    failed = "".join(f"{failure.splitlines()[0]}. " for failure in failures[:1])
    last = ", ".join(
        f"{process.name} {process.last['stage']}" for process in _workers(history) if not process.last.get("ended")
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
