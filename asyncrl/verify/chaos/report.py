"""Report at the end of a chaos run: a table of the faults, the books, the audit, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from asyncrl.comm import names
from asyncrl.verify.chaos.chaos_run import Watched
from asyncrl.verify.chaos.faults import FaultKind, InjectedFault

WIDTH = 80
_SHORT = {
    names.GENERATION_SERVER: "server",
    names.ROLLOUT_WORKER: "worker",
    names.GSERVER_MANAGER: "manager",
    names.MASTER_WORKER: "master",
    names.MODEL_WORKER: "rank",
}


def table(watched: Watched) -> Table:
    """Return a row for each fault, in the order in which they were injected."""
    shown = Table(box=box.SIMPLE_HEAD, width=WIDTH, padding=0, show_edge=False)
    shown.add_column("\n\n#", justify="right")
    shown.add_column("\nat\ns", justify="right", no_wrap=True)
    shown.add_column("\nafter\nstep", justify="right", no_wrap=True)
    shown.add_column("\n\nfault", ratio=1, no_wrap=True)
    shown.add_column("at\nwork\nin s", justify="right", no_wrap=True)
    shown.add_column("next\nstep\nin s", justify="right", no_wrap=True)
    shown.add_column("\nrollouts\nlost", justify="right", no_wrap=True)
    shown.add_column("\ntokens\nlost", justify="right", no_wrap=True)
    shown.add_column("\nsteps\nagain", justify="right", no_wrap=True)
    for done in sorted(watched.done, key=lambda each: each.at):
        shown.add_row(
            str(done.fault.number),
            f"{done.at - watched.began:.0f}",
            str(done.after_step),
            _what(done),
            _back(done),
            _seconds(done.next_step_s),
            _count(done.rollouts),
            _count(done.tokens),
            _count(done.steps_again),
        )
    return shown


def verdict(watched: Watched, wrong_counts: str | None, findings: Sequence[str]) -> list[str]:
    """Return all reasons why the run failed; empty if it passed. `wrong_counts`: the error in the books, if any."""
    wrong = []
    if watched.interrupted:
        wrong.append("it was interrupted")
    elif watched.code is None:
        wrong.append("it did not end by itself: no step and no printed line for too long")
    elif watched.code:
        wrong.append(f"it did not finish by itself: its launcher ended with {watched.code}")
    if wrong_counts is not None:
        wrong.append(wrong_counts)
    if findings:
        wrong.append(f"the audit has {len(findings)} findings")
    wrong += [f"#{fault.number} ({fault.kind} {fault.target}) was not done: {why}" for fault, why in watched.left]
    return wrong


def _what(done: InjectedFault) -> str:
    kind, _, index = done.fault.target.partition("/")
    target = f"{_SHORT.get(kind, kind)}/{index}" if index else kind
    return {
        FaultKind.kill: f"SIGKILL {target}",
        FaultKind.pause: f"SIGSTOP {target}, {done.fault.seconds:.0f} s",
        FaultKind.cut: f"cut {target}, {done.fault.seconds:.0f} s",
        FaultKind.delay: f"late {target}, {done.fault.seconds:.0f} s",
        FaultKind.full_disk: f"disk full, {done.fault.seconds:.0f} s",
    }[done.fault.kind]


def _back(done: InjectedFault) -> str:
    if done.fault.kind is not FaultKind.kill:
        return "-"
    if done.overtaken_by is not None and done.at_work_s is None:
        return f"#{done.overtaken_by}"
    return _seconds(done.at_work_s)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _count(value: int) -> str:
    return f"{value:,}" if value else "-"
