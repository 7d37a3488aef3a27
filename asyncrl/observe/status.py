"""The status of a run, as its processes tell it: what each does, how far the batch is, whether the run stands still.

`ProcessHistory` reads the lines and spans that processes write about themselves (`asyncrl.observe.observer`), and
`Launch` is what those of a run's newest launch tell. They are all that the terminal shows beside rows of metrics. The
doctor (`asyncrl.observe.doctor`) adds what the ledger and the rows tell.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.observe.observer import START, Activity
from asyncrl.observe.tail import Appended, ReadAgain

ObservedLine = dict[str, Any]
KEEP_LINES = 3600
"""Lines of a process that are kept: two hours."""
KEEP_SPANS = 20_000
OLDER = ".1"

FEWEST_STEPS = 3
"""Steps of a run from which on the doctor says what sets its pace."""
STALLED = "The run is stalled"
SILENT_S = 10.0
"""After which a line of a process says nothing about the present any more: a living one writes every two seconds."""
LONG_S = 60.0
TIMES_A_STEP = 8.0
WINDOW_S = 60.0
MOST_LINES = 8
TIMES_LATE = 3.0
"""A step that takes so many times as long as others says nothing on the end of the run."""
TELLING = 0.25
"""Share of the first batch from which on the time so far tells how long the rest takes."""
PACE_STEPS = 11
"""Newest steps whose ends tell how long a step takes."""


@dataclass(slots=True)
class Process:
    """Observations that a process wrote about itself: its newest lines and its spans, each in order."""

    name: str
    lines: deque[ObservedLine] = field(default_factory=lambda: deque(maxlen=KEEP_LINES))
    spans: deque[ObservedLine] = field(default_factory=lambda: deque(maxlen=KEEP_SPANS))

    @property
    def kind(self) -> str:
        """The kind of process, as in its name `<kind>/<index>`."""
        return self.name.partition("/")[0]

    @property
    def last(self) -> ObservedLine:
        """The newest line; empty if there is none."""
        return self.lines[-1] if self.lines else {}

    @property
    def activity(self) -> Activity:
        """The activity in its newest line; `serves` if an earlier version of asyncrl wrote the line."""
        return Activity(self.last.get("activity", Activity.serves))

    def between(self, begin: float, end: float) -> list[ObservedLine]:
        """Return the lines from `begin` to `end`, in seconds since 1970."""
        return [line for line in self.lines if begin <= line["at"] <= end]

    def rate(self, counter: str, begin: float, end: float) -> float | None:
        """Return the growth of `counter` per second between two times; None if unknown.

        A restarted process counts from 0 again; only growth counts.
        """
        readings = [(line["at"], line[counter]) for line in self.between(begin, end) if counter in line]
        if len(readings) < 2 or readings[-1][0] <= readings[0][0]:
            return None
        grown = sum(max(0.0, b - a) for (_, a), (_, b) in itertools.pairwise(readings))
        return float(grown / (readings[-1][0] - readings[0][0]))


class ProcessHistory:
    """Reads `observed/` in `folder`, of processes whose file's name matches `only`; `refresh` takes in what is new."""

    def __init__(self, folder: Path, only: str = "*") -> None:
        self._folder, self._only = folder, only
        self._files: dict[str, Appended] = {}
        self.processes: dict[str, Process] = {}

    def refresh(self) -> None:
        """Take in what is new."""
        for file in sorted(self._folder.glob(f"{self._only}.jsonl")):
            kind, _, index = file.stem.rpartition("-")
            name = f"{kind}/{index}"
            process = self.processes.setdefault(name, Process(name))
            older = file.with_name(file.name + OLDER)
            if name not in self._files:
                self._take(process, Appended(older).read())
                self._files[name] = Appended(file)
            try:
                self._take(process, self._files[name].read())
            except ReadAgain:  # it was full, and is the previous file now
                self._take(process, Appended(older).read(), after=process.last.get("at", 0.0))
                self._take(process, self._files[name].read())

    def launches(self) -> dict[int, float]:
        """Return the launchers that have started all processes: the time of each by its process id."""
        self.refresh()
        of_launchers = self.processes.get("launcher/0", Process("launcher/0"))
        return {span["pid"]: span["end"] for span in of_launchers.spans if span["span"] == START}

    def _take(self, process: Process, raw_lines: list[bytes], after: float = 0.0) -> None:
        for raw in raw_lines:
            try:
                line = json.loads(raw)
                if "span" in line:
                    if line["end"] > after:
                        process.spans.append(line)
                elif line["at"] > after and Activity(line.get("activity", Activity.serves)):
                    process.lines.append(line)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue  # cut by a full disk, or not written by asyncrl


class StatusLine(NamedTuple):
    """A line on the state of a run, and since when it is so, in seconds; None if it has no beginning."""

    text: str
    seconds: float | None = None

    def __str__(self) -> str:
        return self.text if self.seconds is None else f"{self.text} ({self.seconds:.0f} s)"


class StepSizes(NamedTuple):
    """The settings on which the outlook depends."""

    total_train_steps: int
    train_batch_size: int
    group_size: int


class Launch:
    """The newest launch of a run, at the time of its newest line.

    Args:
        processes: of all launches, by name.

    Attributes:
        began_at: time of its first line, in seconds since 1970; 0 if launchers wrote none.
        now: time of the newest line.
        processes: those that wrote lines in it, without the launcher.
        manager: the newest line of the GserverManager; empty if it wrote none.
        rollouts_since: time of the first line in which rollouts run; None if there is none.
        step: number of the newest step, also of an earlier launch.
        step_ends: times at which the training of its newest steps ended.
        silent: the processes that should still write lines, and have not done so for some seconds.
    """

    def __init__(self, processes: Mapping[str, Process]) -> None:
        launcher = processes.get("launcher/0", Process("launcher/0"))
        self.began_at = next((float(line["at"]) for line in launcher.lines if line["pid"] == launcher.last["pid"]), 0.0)
        self.now = max((process.last.get("at", 0.0) for process in processes.values()), default=0.0)
        others = (process for process in processes.values() if process.kind != "launcher" and process.lines)
        self.processes = [process for process in others if process.last["at"] >= self.began_at]
        self.silent = [p.name for p in self.processes if self.now - p.last["at"] > SILENT_S and not p.last.get("ended")]
        manager = next(iter(self.of_kind("gserver_manager")), Process("gserver_manager/0"))
        self.manager, lines = manager.last, manager.between(self.began_at, self.now)
        self.rollouts_since: float | None = next((line["at"] for line in lines if line.get("rollouts_running")), None)
        master = processes.get("master_worker/0", Process("master_worker/0"))
        trained = [span for span in master.spans if span["span"] == "train"]
        newest = int(trained[-1]["step"]) if trained else 0
        reported = int(self.manager.get("trained_version", newest))
        # The manager is told of a step a moment after its span is written. Further back is a run that has gone back.
        self.step = reported if reported < newest - 1 else max(reported, newest)
        ends = [span["end"] for span in trained if span["end"] >= self.began_at and span["step"] <= self.step]
        self.step_ends: list[float] = ends[-PACE_STEPS:]

    def of_kind(self, kind: str) -> list[Process]:
        """Return its processes of a kind."""
        return [process for process in self.processes if process.kind == kind]

    @property
    def step_s(self) -> float:
        """Seconds of a step, by the newest ones; of a single one, since the first rollout."""
        ends = self.step_ends if len(self.step_ends) > 1 else [self.rollouts_since or self.now, *self.step_ends]
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    def doing(self) -> list[StatusLine]:
        """Return what the processes do that do not just serve, and since when; or else that all do."""
        found = [
            StatusLine(f"{process.name} {process.last['stage']}", max(0.0, self.now - process.last["since"]))
            for process in self.processes
            if process.activity is not Activity.serves and not process.last.get("ended")
        ]
        at_work = "all processes are at work: the first batch is being generated"
        first = at_work if self.of_kind("master_worker") else "the processes are starting"
        return found or [StatusLine("all processes wait" if self.step_ends else first)]

    def describe(self) -> str:
        """Return what they do as a part of a sentence."""
        return "; ".join(text if since is None else f"{text} since {since:.0f} s" for text, since in self.doing())


def status_lines(launch: Launch) -> list[StatusLine]:
    """Describe a run for the terminal: what its processes do until this launch has made a step, then only that it
    stands still.
    """
    if launch.step_ends:
        return [StatusLine(f"{STALLED}: {' '.join(found)}")] if (found := stall(launch)) else []
    doing = launch.doing()
    more = StatusLine(f"and {len(doing) - MOST_LINES + 1} other processes")
    return doing if len(doing) <= MOST_LINES else [*doing[: MOST_LINES - 1], more]


def stall(launch: Launch) -> tuple[str, str] | None:
    """Return what is known of a launch that makes no more steps, and where to look; None if it makes some, or its step
    is only long: answers end, or ranks compute.
    """
    now = launch.now
    since = now - launch.step_ends[-1]
    if since < max(LONG_S, TIMES_A_STEP * launch.step_s):
        return None
    if any(p.rate(work, now - WINDOW_S, now) for p in launch.processes for work in ("answers_total", "flops_total")):
        return None
    sentence = f"no step since {since:.0f} s, after step {launch.step}; {launch.describe()}."
    if silent := launch.silent:
        sentence += f" Silent: {', '.join(silent)}."
    if launch.manager:
        running, waiting = (launch.manager.get(name, 0) for name in ("rollouts_running", "finished_untrained"))
        sentence += f" The manager counts {running:.0f} rollouts under way and {waiting:.0f} that wait to be trained."
    return sentence, f"Look at the log of {[*silent, 'the process named first'][0]}; py-spy dump shows where it is."


def outlook(launch: Launch, sizes: StepSizes) -> str:
    """Return how far the batch at hand is, when it will be complete, and when the run will end, as far as that can be
    told; empty before the first rollout.
    """
    gate, begun, now = launch.manager, launch.rollouts_since, launch.now
    total, batch, group = sizes
    if begun is None or not batch or launch.step >= total:
        return ""
    training = any(process.last.get("training") for process in launch.of_kind("master_worker"))
    ready = min(batch, int(gate.get("finished_untrained", 0)))
    what = f"step {launch.step + 1} of {total}"
    what += " trains" if training else f": {ready} of {batch} rollouts are ready"
    if not launch.step_ends:
        answers = sum(int(process.last.get("answers_total", 0)) for process in launch.of_kind("rollout_worker"))
        submitted = max(batch, int(gate.get("submitted_total", 0)) - int(gate.get("trained_total", 0)))
        share = max(ready / batch, min(0.99, answers / (submitted * group)))
        if training:
            return f"{what}; the first step shows how long the run takes"
        what += f", {answers} answers of at least {batch * group} are complete"
        servers = [each.last for each in launch.of_kind("generation_server") if each.last.get("tokens_per_s")]
        if servers:
            what += f"; {sum(each['tokens_per_s'] for each in servers):,.0f} tokens/s"
        at_once = sum(int(each.get("running", 0)) for each in servers) or int(gate.get("rollouts_running", 0)) * group
        too_few = share < TELLING and answers < at_once  # answers that began together end together
        if share >= 1.0 or not share or too_few:
            return what
        left_s = (now - begun) * (1.0 - share) / share
        run_s = (left_s + now - begun) * (total - launch.step)
        return f"{what}; the batch in {about(left_s)}, the run in more than {about(run_s)}"
    step_s, since_s = launch.step_s, now - launch.step_ends[-1]
    if since_s > TIMES_LATE * step_s:
        return f"{what}, not complete after {about(since_s)}, where a step takes {about(step_s)}"
    left_s = max(0.0, step_s - since_s)
    return f"{what}, complete in {about(left_s)}; the run in {about((total - launch.step - 1) * step_s + left_s)}"


def about(seconds: float) -> str:
    """Return a duration for people, e.g. `about 4 min`."""
    minutes = round(seconds / 60.0)
    if seconds < 90.0:
        return f"about {max(1, round(seconds))} s"
    return f"about {minutes} min" if minutes < 120 else f"about {minutes // 60} h {minutes % 60:02d} min"
