"""`python -m asyncrl.launch doctor RUN --plan DEVICES`: find the fastest split of devices, and the fastest η."""

from __future__ import annotations

import dataclasses
import json
import sys

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from asyncrl.launch.refusal import refuse
from asyncrl.observe.doctor.measured import Measured, measure
from asyncrl.observe.doctor.server_rules import STARVED
from asyncrl.observe.history import History
from asyncrl.runtime.exit_codes import EXIT_OK
from asyncrl.verify.simulator.plans.fastest_split import Candidate, Plan, plan
from asyncrl.verify.simulator.plans.measured_run import MeasuredRun, NotMeasured, measured_run

FAR_OFF = 0.25
"""With a larger relative error of the prediction for the run as it was, the plan warns that it is unreliable."""
SHOWN = 12
NO_CORES = (
    "Threads of servers waited for a free core. The plan is for hosts whose cores are free: on a full host, more "
    "processes do not add up."
)


def show_plan(history: History, devices: int, as_json: bool) -> int:
    """Print the plan; returns the exit code."""
    try:
        if (measured := measure(history)) is None:
            raise NotMeasured("the run has too few steps; let it train some more")
        run = measured_run(history, measured)
        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("simulating", total=None)
            found = plan(run, devices, lambda done, total: bar.update(task, completed=done, total=total))
    except ValueError as error:
        return refuse(error)
    if as_json:
        print(json.dumps(_as_json(history, run, found) | {"no_cores": _lacked_cores(measured)}))
    else:
        console = Console(highlight=False)
        _show(history, found, console)
        if _lacked_cores(measured):
            console.print(NO_CORES, style="yellow")
    return EXIT_OK


def _lacked_cores(measured: Measured) -> bool:
    return any((server.no_core or 0.0) > STARVED for server in measured.all_servers)


def settings_of(best: Candidate, workers: int) -> str:
    """Return the candidate as settings of an experiment."""
    places = -(-best.places // max(1, workers))
    return (
        f"trainer.parallel={best.layout} generation.servers={best.servers} max_head_offpolicyness={best.eta} "
        f"rollout.max_concurrent={places}"
    )


def _as_json(history: History, run: MeasuredRun, found: Plan) -> dict[str, object]:
    return {
        "run": str(history.folder),
        "devices": found.devices,
        "measured_step_s": found.measured_step_s,
        "own": dataclasses.asdict(found.own),
        "off": found.off,
        "best": dataclasses.asdict(found.best),
        "settings": settings_of(found.best, run.setup.workers),
        "candidates": [dataclasses.asdict(each) for each in found.candidates],
        "rates": {
            "decode_step_s": run.setup.engine.step_s,
            "decode_sample_s": run.setup.engine.sequence_s,
            "train_fixed_s": run.setup.trainer.fixed_s,
            "train_token_s": run.setup.trainer.token_s,
            "publish_s": run.setup.trainer.publish_s,
            "update_s": run.setup.engine.update_s,
            "user_s": run.setup.user_s,
        },
        "assumed": list(found.assumed),
    }


def _show(history: History, found: Plan, console: Console) -> None:
    best = found.best
    console.print(Text(f"{history.name}: a plan for {found.devices} devices", style="bold"))
    console.print(
        f"\nFastest: {best.training} train, {best.generation} generate, η = {best.eta}: {best.step_s:.2f} s a step."
    )
    console.print(f"  → {settings_of(best, int(history.setting('rollout.workers', 1)))}", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("train", "generate", "η", "at once", "s a step", "training waits", "servers idle", "mean age"):
        table.add_column(name, justify="right")
    shown = list(found.candidates[:SHOWN])
    for each in shown:
        table.add_row(*_cells(each), style="bold" if each is best else "")
    table.add_section()
    table.add_row(*_cells(found.own), style="dim")
    console.print()
    console.print(table)
    if len(found.candidates) > SHOWN:
        console.print(f"and {len(found.candidates) - SHOWN} slower ones")
    took = f"The last row is the run as it was: it took {found.measured_step_s:.2f} s a step"
    console.print(f"\n{took}, so the prediction is {found.off:+.0%} off.")
    if abs(found.off) > FAR_OFF:
        console.print("That is far off: take the order of the rows, not their figures.", style="yellow")
    for line in found.assumed:
        console.print(Text(f"assumed: {line}", style="dim"))


def _cells(each: Candidate) -> tuple[str, ...]:
    return (
        str(each.training),
        str(each.generation),
        str(each.eta),
        str(each.places),
        f"{each.step_s:.2f}",
        f"{each.wait:.0%}",
        f"{each.idle:.0%}",
        f"{each.staleness:.1f}",
    )
