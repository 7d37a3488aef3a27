"""NashConv over steps of runs of `kuhn_poker`: a table, and the figure in docs/results.md.

    python benchmarks/kuhn_poker.py "newest self=RUN" "pool of older selves=RUN" --plot docs/kuhn_poker.png

A name may be given several times, for runs that differ by their seed:

    for seed in 1 2 3; do
        python -m asyncrl.launch kuhn_poker seed=$seed trial_name=self$seed
        python -m asyncrl.launch kuhn_poker seed=$seed trial_name=pool$seed agent.args.opponent=past
    done

The figure is the one that the runs' evaluations measured, from the probabilities of a bet in all twelve states. With
OpenSpiel installed it is computed again by OpenSpiel; the two must agree.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.observe.history.tail import read_rows

RANDOM_PLAY, TARGET = 11 / 12, 0.25
COLUMN, BETS = "eval/play/agent/nash_conv", "eval/play/agent/bet_"
Curve = list[tuple[int, float]]


def curve(run: Path) -> Curve:
    """Return (step, NashConv) of each evaluation of a run."""
    rows = read_rows(run / "metrics.jsonl")
    measured = [row for row in rows if COLUMN in row]
    for row in measured:
        check(row[COLUMN], {name.removeprefix(BETS): row[name] for name in row if name.startswith(BETS)})
    return [(row["step"], row[COLUMN]) for row in measured]


def check(measured: float, bets: dict[str, float]) -> None:
    """Compare with OpenSpiel's NashConv of the policy with these probabilities, if it is installed.

    Raises:
        ValueError: they differ.
    """
    try:
        import pyspiel
    except ImportError:
        return
    names = {state: f"{int(state[0]) - 1}{state[1:-1].replace('0', 'p').replace('1', 'b')}" for state in bets}
    table = pyspiel.TabularPolicy({names[state]: [(0, 1 - bet), (1, bet)] for state, bet in bets.items()})
    found = pyspiel.nash_conv(pyspiel.load_game("kuhn_poker"), table)
    if abs(found - measured) > 1e-6:
        raise ValueError(f"the run measured a NashConv of {measured}, OpenSpiel {found}")


def longest_above(points: Curve) -> int:
    """Return the longest number of steps in a row, after the first figure at the target, that are above it."""
    first = next((step for step, value in points if value <= TARGET), None)
    longest, since = 0, None
    for step, value in points:
        if first is None or step < first:
            continue
        if value <= TARGET:
            since = None
        else:
            since = step if since is None else since
            longest = max(longest, step - since + 1)
    return longest


def plot(curves: list[tuple[str, Curve]], target: Path) -> None:
    """Draw the curves, random play and the target."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    names = list(dict.fromkeys(name for name, _ in curves))
    for number, (name, points) in enumerate(curves):
        first = name not in (earlier for earlier, _ in curves[:number])
        axes.plot(*zip(*points, strict=True), color=f"C{names.index(name)}", label=name if first else None)
    axes.axhline(RANDOM_PLAY, color="grey", linestyle=":", label="random play")
    axes.axhline(TARGET, color="grey", linestyle="--", label=f"{TARGET}")
    axes.set(xlabel="train step", ylabel="NashConv (chips a game)", ylim=(0, 1))
    axes.legend()
    figure.savefig(target, dpi=110)


def main() -> None:
    """Print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="NAME=RUN, the folder of a run")
    parser.add_argument("--plot", type=Path, help="the PNG to write")
    arguments = parser.parse_args()
    curves = [
        (name, curve(Path(folder).expanduser())) for name, _, folder in (run.partition("=") for run in arguments.runs)
    ]
    print("| against | at the start | best | at the end | first at 0.25 or less | longest above it afterwards |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, points in curves:
        first = next((step for step, value in points if value <= TARGET), None)
        figures = f"{points[0][1]:.2f} | {min(value for _, value in points):.2f} | {points[-1][1]:.2f}"
        reached = "never" if first is None else f"step {first}"
        print(f"| {name} | {figures} | {reached} | {longest_above(points)} steps |")
    if arguments.plot:
        plot(curves, arguments.plot)


if __name__ == "__main__":
    main()
