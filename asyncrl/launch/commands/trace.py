"""`python -m asyncrl.launch trace RUN`: show a run over time, for ui.perfetto.dev or as a picture.

Exit codes: 0 written, 2 the folder is not a run or has none of the steps, or a file cannot be written.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from asyncrl.launch.refusal import refuse
from asyncrl.observe.history import History
from asyncrl.observe.timeline import Timeline, timeline
from asyncrl.observe.timeline.chrome import chrome_trace
from asyncrl.observe.timeline.spans import LAST_STEPS
from asyncrl.observe.timeline.svg import svg_picture
from asyncrl.runtime.exit_codes import EXIT_OK


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"{program} trace",
        description="Write what a run did when, as a Chrome trace (open it in ui.perfetto.dev) or an SVG picture.",
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="the trace; default: trace.json")
    parser.add_argument("--svg", type=Path, metavar="FILE.svg", help="a picture")
    parser.add_argument(
        "--steps",
        type=_steps,
        default=(None, None),
        metavar="FROM:TO",
        help=f"train steps, such as 8:22, 8 or `:` for all; default: the newest {LAST_STEPS}",
    )
    args = parser.parse_args(argv)
    out = args.out or (None if args.svg is not None else Path("trace.json"))
    try:
        line, name = _read(args.run, *args.steps)
        if args.svg is not None:
            args.svg.write_text(svg_picture(line, name), encoding="utf-8")
            print(f"{args.svg}: {len(line.spans)} spans, {args.svg.stat().st_size / 1e6:.1f} MB")
        if out is not None:
            trace = chrome_trace(line, name)
            out.write_text(json.dumps(trace, separators=(",", ":"), allow_nan=False), encoding="utf-8")
            size = out.stat().st_size / 1e6
            print(f"{out}: {len(trace['traceEvents'])} events, {size:.1f} MB; open it in https://ui.perfetto.dev")
    except OSError as error:
        return refuse(f"{error.filename}: {error.strerror}; give another file or folder")
    except ValueError as error:
        return refuse(error)
    return EXIT_OK


def _read(run: Path, first: int | None, last: int | None) -> tuple[Timeline, str]:
    """Return the timeline and the name of the run in the folder `run`."""
    history = History(run, keep_steps=LAST_STEPS) if first is None else History(run, keep_from=first)
    return timeline(history, first, last), history.name


def _steps(text: str) -> tuple[int, int | None]:
    """Parse the first and last step from `FROM:TO` or a single number; without a last step, all from the first on."""
    match = re.fullmatch(r"(?P<first>\d*):(?P<last>\d*)|(?P<only>\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give FROM:TO, such as 8:22, or one step, such as 8")
    if match["only"] is not None:
        return int(match["only"]), int(match["only"])
    first, last = int(match["first"] or 0), int(match["last"]) if match["last"] else None
    if last is not None and last < first:
        raise argparse.ArgumentTypeError(f"{text!r}: step {last} comes before step {first}; give {last}:{first}")
    return first, last
