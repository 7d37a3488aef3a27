"""`python -m asyncrl.launch doctor RUN`: explain a run's speed, and find its problems, from its files. `--plan` is in
`plan`.

`doctor EXPERIMENT [setting=value ...]` makes every check of a start without starting anything (`start_checks`).

Exit codes: 0 nothing is wrong, 1 there is a problem, 2 the folder is not a run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.config.run_dir import CONFIG_FILE
from asyncrl.launch.commands import refuse
from asyncrl.observe.display import wrapped
from asyncrl.observe.doctor import Diagnosis, examine
from asyncrl.observe.doctor.finding import Finding, Level
from asyncrl.observe.history import History
from asyncrl.runtime.settings import EXIT_FAILED, EXIT_OK

_STYLE = {Level.problem: "bold red", Level.bottleneck: "bold yellow", Level.notice: "bold green"}
_BAR = 10


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; return the exit code."""
    of = next((item for item in argv if not item.startswith("-")), None)
    if of is None or "/" in of or _is_run(Path(of)):
        return _explain_run(argv, program)
    from asyncrl.launch.commands.doctor import start_checks

    return start_checks.main(argv, program)


def _is_run(path: Path) -> bool:
    """True for a run's folder or a file of one; `fileroot=.` leaves a folder with the name of the experiment."""
    return path.is_file() or (path / CONFIG_FILE).is_file()


def _explain_run(argv: Sequence[str], program: str) -> int:
    """Run the command for a run; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"{program} doctor",
        description="Explain a run's speed, and find its problems.",
        epilog=f"Before a run: {program} doctor EXPERIMENT [setting=value ...] makes every check of a start.",
    )
    parser.add_argument("run", type=Path, help="folder of the run, which may be running, have ended or have died")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--plan",
        type=int,
        metavar="DEVICES",
        help="find the best split of this number of devices between training and generation, by the rates of the run",
    )
    args = parser.parse_args(argv)
    try:
        history = History(args.run)
    except ValueError as error:
        return refuse(error)
    if args.plan is not None:
        from asyncrl.launch.commands.doctor.plan import show_plan

        return show_plan(history, args.plan, args.json)
    diagnosis = examine(history)
    if args.json:
        print(json.dumps(as_json(history, diagnosis)))
    else:
        show(history, diagnosis, Console(highlight=False))
    return EXIT_FAILED if any(finding.level is Level.problem for finding in diagnosis.findings) else EXIT_OK


def as_json(history: History, diagnosis: Diagnosis) -> dict[str, object]:
    """Return the diagnosis for scripts."""
    return {
        "run": str(history.folder),
        "state": str(history.state),
        "step": max(history.steps, default=0),
        **diagnosis.as_json(),
        "measured": None if diagnosis.measured is None else dataclasses.asdict(diagnosis.measured),
    }


def show(history: History, diagnosis: Diagnosis, console: Console) -> None:
    """Print the diagnosis for people."""
    step, total = max(history.steps, default=0), history.setting("total_train_steps", 0)
    console.print(Text(f"{history.name}: {history.state}, step {step} of {total}", style="bold"))
    for finding in diagnosis.findings:
        console.print(_text_of(finding, console))
    if not diagnosis.findings:
        console.print("Nothing is wrong as far as its files tell.")
    if (m := diagnosis.measured) is not None:
        console.print(Text(f"\nsteps {m.steps[0]} to {m.steps[1]}, {m.step_s:.2f} s each", style="dim"))
        console.print(_stages(diagnosis))
    for missing in diagnosis.not_measured:
        console.print(Text(f"not measured: {missing}", style="dim"))


def _text_of(finding: Finding, console: Console) -> Text:
    text = Text("\n")
    text.append(finding.title, style=_STYLE[finding.level])
    text.append(f": {finding.sentence}")
    for more in (finding.advice, finding.gain):
        if more:
            text.append("\n" + wrapped(f"  → {more}", console, indent=4))
    text.append(f"\n  {finding.link}", style="dim")
    return text


def _stages(diagnosis: Diagnosis) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=_ < 2)
    for stage in diagnosis.stages:
        filled = 0 if stage.use is None else round(_BAR * min(1.0, max(0.0, stage.use)))
        share = "   ?" if stage.use is None else f"{100 * stage.use:3.0f} %"
        style = "red" if stage.use is not None and stage.use > 0.85 else "cyan"
        bar = Text("█" * filled, style=style) + Text("░" * (_BAR - filled), style="dim") + Text(f" {share}")
        table.add_row(Text(stage.name), bar, Text(stage.figures))
    return table
