"""`python -m asyncrl.launch chaos EXPERIMENT [setting=value ...]`: run it while injecting faults.

The plan is made from the seed. Processes are killed and paused, and connections to the servers are cut and slowed down.
The disk is full for a while, if it may be filled. The run has its own trial. At the end its files are audited; a table
shows the faults, how long it took until the run continued, and the costs.

Exit codes: 0 the run finished by itself, its rollout counts balance, the audit found nothing and the whole plan was
carried out; 1 otherwise; 2 a setting is wrong; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.comm import names
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import LEDGER_DIR, OBSERVED_DIR, RESTARTS_FILE, read_summary, run_dir_of
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.setting_checks import experiment_parser, load_rl
from asyncrl.launch.commands import ERROR, refuse
from asyncrl.launch.commands.audit import Audit, audit
from asyncrl.launch.train import summary_lines
from asyncrl.observe.status import ProcessHistory
from asyncrl.observe.tail import read_rows
from asyncrl.runtime.plan import PROCESS_KINDS, Restart, plan_workers
from asyncrl.runtime.settings import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from asyncrl.trainer.parallel.placement import worker_grid
from asyncrl.verify.audit.ledger_files import read_ledger
from asyncrl.verify.chaos.chaos_run import WIDTH, ChaosRun, Watched, table, verdict, why_no_disk_is_filled
from asyncrl.verify.chaos.faults import LAUNCHER, Fault, FaultKind, add_costs, complete, find_work, make_plan

_BUDGET = "system.restarts_per_process"
_OURS = ("resume", "logging.display")
"""Settings that this command sets itself."""


def main(argv: Sequence[str], program: str) -> int:
    """Run the command with the arguments after `chaos`; return the exit code."""
    args = _parse(argv, program)
    try:
        settings = _settings(args)
        config = load_rl(args, settings)
        plan, left_out = _plan(args, config)
    except (ConfigError, ValueError) as error:
        return refuse(str(error))
    logging.getLogger("asyncrl").addHandler(logging.NullHandler())  # else Python prints warnings about lost names
    console = Console(highlight=False, markup=False, soft_wrap=True)
    chosen = [text for text in settings if text not in args.overrides]
    console.print(f"chaos: {len(plan)} faults, seed {args.seed}, in {run_dir_of(config)}")
    console.print(f"chaos: settings of its own: {' '.join(chosen)}")
    for line in left_out:
        console.print(f"chaos: left out: {line}")
    if args.dry_run:
        for fault in plan:
            console.print(f"#{fault.number} after step {fault.step}: {fault.kind} {fault.target} {fault.seconds:g} s")
        return EXIT_OK
    command = [sys.executable, "-m", "asyncrl.launch", args.experiment]
    command += ["--config-dir", str(args.config_dir)] if args.config_dir is not None else []
    again = [text if not text.startswith("resume=") else "resume=auto" for text in settings]
    used = {fault.target for fault in plan if fault.kind in (FaultKind.cut, FaultKind.delay)}
    links = {process: key for process, key in _links(config).items() if process in used}
    run = ChaosRun(config, [*command, *settings], [*command, *again], plan, links=links, tell=console.print)
    watched = asyncio.run(run.run())
    return _report(args, config, watched, left_out, console)


def _parse(argv: Sequence[str], program: str) -> argparse.Namespace:
    parser = experiment_parser(f"{program} chaos", __doc__ or "")
    parser.add_argument("--seed", type=_natural, default=0, help="another seed, another plan")
    parser.add_argument("--kills", type=_natural, default=20, metavar="N", help="processes killed (20)")
    parser.add_argument("--pauses", type=_natural, default=2, metavar="N", help="processes stopped for 2 to 20 s (2)")
    parser.add_argument("--cuts", type=_natural, default=2, metavar="N", help="a server's connections broken (2)")
    parser.add_argument("--delays", type=_natural, default=2, metavar="N", help="a server's connections slow (2)")
    parser.add_argument("--full-disks", type=_natural, default=1, metavar="N", help="no room on the disk (1)")
    parser.add_argument(
        "--kinds",
        metavar="KIND,KIND",
        help="kinds of processes to hit: those of the run, and `launcher` (after its death the same command is given "
        "again); default: all",
    )
    parser.add_argument("--every", type=_natural, metavar="STEPS", help="steps between faults; default: over the run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    return parser.parse_intermixed_args(argv)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _settings(args: argparse.Namespace) -> list[str]:
    """Return the user's settings and those that this command adds.

    Raises:
        ConfigError: the user gave a setting that this command sets itself.
    """
    given = {text.partition("=")[0].lstrip("+") for text in args.overrides}
    if taken := given.intersection(_OURS):
        raise ConfigError(f"{sorted(taken)[0]}: `chaos` sets it; leave it out")
    added = ["logging.display=plain"]
    if "trial_name" in given:
        added.append("resume=never")  # no existing trial is continued or wiped
    else:
        added += [f"trial_name=chaos-{args.seed}", "resume=restart"]
    if _BUDGET not in given:
        added.append(f"{_BUDGET}={args.kills + 1}")
    return [*args.overrides, *added]


def _plan(args: argparse.Namespace, config: ExperimentConfig) -> tuple[tuple[Fault, ...], list[str]]:
    """Return the faults, and the kinds left out with the reasons.

    Raises:
        ConfigError, ValueError: this run allows no such plan.
    """
    if config.system.launcher != "local":
        raise ConfigError(
            f"system.launcher={config.system.launcher!r}: `chaos` hits processes of this machine alone; use local"
        )
    processes: dict[str, list[str]] = {}
    for worker in plan_workers(config):
        processes.setdefault(worker.kind, []).append(worker.name)
    final = {kind for kind in processes if PROCESS_KINDS[kind].restart is Restart.nothing}
    left_out = [f"{kind}: a run does not survive its death" for kind in sorted(final)]
    hit = {kind: those for kind, those in processes.items() if kind not in final} | {LAUNCHER: [LAUNCHER]}
    if args.kinds is not None:
        wanted = [kind for kind in args.kinds.split(",") if kind]
        if unknown := [kind for kind in wanted if kind not in hit]:
            raise ConfigError(f"--kinds {args.kinds}: this run has no {unknown[0]!r}; it has {', '.join(sorted(hit))}")
        hit = {kind: hit[kind] for kind in wanted}
    if LAUNCHER in hit and args.kinds is None and not config.checkpoint.interval:
        del hit[LAUNCHER]
        left_out.append("kills of the launcher: with checkpoint.interval=0 it would begin at step 0 again")
    killed = hit
    if args.kinds is None and not config.checkpoint.in_memory:
        killed = {kind: those for kind, those in hit.items() if not _goes_back(kind)}
        left_out.append(
            "kills of MasterWorker, GserverManager and ModelWorkers: with checkpoint.in_memory=false each restarts the "
            "whole run, which it does once within system.restart_window_s"
        )
    servers: dict[str, list[str]] = {}
    for name in _links(config):
        servers.setdefault(name.partition("/")[0], []).append(name)
    if config.generation.engine.urls:
        urls = config.generation.engine.named("urls")
        left_out.append(f"cuts and delays of {urls}: those servers are not the run's")
    counts = {
        FaultKind.kill: args.kills,
        FaultKind.pause: args.pauses,
        FaultKind.cut: args.cuts,
        FaultKind.delay: args.delays,
        FaultKind.full_disk: args.full_disks,
    }
    if args.full_disks and (why := why_no_disk_is_filled(run_dir_of(config))) is not None:
        counts[FaultKind.full_disk] = 0
        left_out.append(f"full disks: {why}")
    targets: Mapping[FaultKind, Mapping[str, Sequence[str]]] = {
        FaultKind.kill: killed,
        FaultKind.pause: hit,
        FaultKind.cut: servers,
        FaultKind.delay: servers,
        FaultKind.full_disk: {"disk": ["disk"]},
    }
    steps = config.total_train_steps
    return make_plan(targets, counts, steps=steps, seed=args.seed, every=args.every), left_out


def _goes_back(kind: str) -> bool:
    """True if a run that keeps its steps continues from the last step after a process of `kind` dies."""
    return kind != LAUNCHER and PROCESS_KINDS[kind].restart is Restart.together


def _links(config: ExperimentConfig) -> dict[str, str]:
    """Return the processes that others find by name resolution, with their entries: manager, generation servers, and
    ranks that receive trajectories.
    """
    there = {worker.name for worker in plan_workers(config)}
    links = {f"{names.GSERVER_MANAGER}/0": names.MANAGER_KEY}
    if not config.generation.engine.urls:
        servers = range(config.generation.servers)
        links |= {f"{names.GENERATION_SERVER}/{index}": names.gen_server_key(index) for index in servers}
    heads = worker_grid(config).data_heads
    links |= {f"{names.MODEL_WORKER}/{worker}": names.puller_key(head) for head, worker in enumerate(heads)}
    return {process: key for process, key in links.items() if process in there}


def _report(
    args: argparse.Namespace, config: ExperimentConfig, watched: Watched, left_out: list[str], console: Console
) -> int:
    """Audit the run, print table and verdict, and return the exit code."""
    if watched.code == EXIT_CONFIG and not watched.steps:  # the launcher refused a setting
        return refuse("\n".join(line.removeprefix(ERROR) for line in watched.lines))
    run_dir = run_dir_of(config)
    entries = read_ledger(run_dir / LEDGER_DIR, lambda location, what: None)  # the audit reports its errors
    launches = ProcessHistory(run_dir / OBSERVED_DIR, "launcher-0").launches()
    complete(watched.done, watched.steps, read_rows(run_dir / RESTARTS_FILE), sorted(launches.values()))
    find_work(watched.done, entries)
    add_costs(watched.done, entries)
    found = audit(run_dir) if (run_dir / LEDGER_DIR).is_dir() else Audit(("there is no ledger",), None)  # type: ignore[arg-type]
    wrong = verdict(watched, _counts_fault(run_dir), found.findings)
    if wrong:
        console.print("the end of what the launcher printed:")
        for line in watched.lines:
            console.print(f"    {line}")
    Console(highlight=False, width=WIDTH).print(table(watched))
    for line in summary_lines(run_dir):
        console.print(line)
    for line in found.findings:
        console.print(f"audit      {line}")
    if not found.findings:
        console.print("audit      nothing found")
    for line in wrong:
        console.print(f"FAILED     {line}")
    if not wrong:
        console.print(f"passed     {len(watched.done)} faults; the run finished by itself")
    if args.json is not None:
        args.json.write_text(json.dumps(_as_json(args, watched, left_out, found, wrong), indent=2) + "\n")
    if watched.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if wrong else EXIT_OK


def _counts_fault(run_dir: Path) -> str | None:
    """Describe the error in the summary's rollout counts; None if they balance."""
    summary = read_summary(run_dir)
    if summary is None:
        return "the run left no summary"
    totals = summary["books"]
    total = totals["trained"] + sum(totals["dropped"].values()) + totals["abandoned"]
    if totals["submitted"] != total:
        return f"the rollout counts do not balance: submitted {totals['submitted']}, accounted for {total}"
    return None


def _as_json(
    args: argparse.Namespace, watched: Watched, left_out: list[str], found: Audit, wrong: list[str]
) -> dict[str, Any]:
    return {
        "experiment": args.experiment,
        "seed": args.seed,
        "exit_code": watched.code,
        "faults": [asdict(done) for done in sorted(watched.done, key=lambda each: each.at)],
        "left_out": left_out,
        "not_done": [{"number": fault.number, "why": why} for fault, why in watched.left],
        "steps": watched.steps,
        "began": watched.began,
        "findings": list(found.findings),
        "wrong": wrong,
    }
