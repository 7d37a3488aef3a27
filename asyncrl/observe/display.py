"""Display of a running run: one live panel on a terminal, one line per train step elsewhere.

The launcher passes them rows of `metrics.jsonl`; they do not know the processes.
"""

from __future__ import annotations

import os
import termios
import textwrap
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import IO, Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.comm.ended_rollouts import DROPPED, failure, lost_episodes
from asyncrl.observe.metrics.learning import FlatSteps
from asyncrl.observe.settings import DisplayMode
from asyncrl.observe.status import FEWEST_STEPS, StatusLine

Row = Mapping[str, Any]

_BARS = "▁▂▃▄▅▆▇█"
_TREND_WIDTH = 24
_OUTLOOK_S = 60.0
"""Least time in s between two lines of a plain display that say how far the step is, and after a step's line."""
_RECENT = 10
"""Number of newest steps over which rates and shares of time are computed."""
_REFRESH_S = 0.25
_LOCAL_MODES = 3
"""Index of the modes that echo typed keys in the list of `termios.tcgetattr`."""


class Display(Protocol):
    """Progress display that the launcher updates."""

    def note(self, text: str) -> None:
        """Show a notice."""

    def row(self, row: Row) -> None:
        """Show a row of metrics."""

    def stage_lines(self, lines: Sequence[StatusLine]) -> None:
        """Show the state of the run: what the processes do before the first step, then only that it stands still."""

    def outlook(self, text: str) -> None:
        """Show how far the step at hand is, and when it and the run will end."""

    def close(self) -> None:
        """End the display."""


def make_display(kind: DisplayMode, title: str, total_steps: int, eta: int, doctor: str = "") -> Display:
    """Return the display of the given `kind`; `doctor` is the command that says what sets the pace of the run."""
    console = Console(highlight=False)
    if kind == DisplayMode.auto:
        kind = DisplayMode.live if console.is_terminal else DisplayMode.plain
    if kind == DisplayMode.live:
        return LiveDisplay(console, title, total_steps, eta, doctor)
    return PlainDisplay(console if kind == DisplayMode.plain else Console(quiet=True), total_steps)


def wrapped(text: str, console: Console, indent: int = 0) -> str:
    """Return `text` with its lines wrapped to the terminal's width; unchanged without a terminal.

    Paths and commands stay whole, so that they can be copied. Continuation lines are indented by `indent`.
    """
    if not console.is_terminal:
        return text
    wrap = partial(
        textwrap.wrap,
        width=console.width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return "\n".join(part for line in text.split("\n") for part in wrap(line) or [""])


def trend(values: list[float], width: int = _TREND_WIDTH) -> str:
    """Return the last `width` values as bars between their least and greatest."""
    shown = values[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)


def evaluations(row: Row) -> dict[str, dict[str, float]]:
    """Return the evaluated sets of a row, each with its figures; one that failed has the figure `failed`."""
    found: dict[str, dict[str, float]] = {}
    for key, value in row.items():
        if key.startswith("eval/"):
            name, _, figure = key.removeprefix("eval/").partition("/")
            found.setdefault(name, {})[figure] = value
    return found


def main_figures(row: Row) -> dict[str, float]:
    """Return the main figure of each evaluated set of a row: `<set> accuracy` if there is a verdict, else `<set>
    reward`.
    """
    return {
        f"{name} {label}": figures[figure]
        for name, figures in evaluations(row).items()
        for label, figure in [("accuracy", "accuracy") if "accuracy" in figures else ("reward", "reward_mean")]
        if figure in figures
    }


def generated_per_s(recent: Collection[Row]) -> float:
    """Return generated tokens per second over recent steps: rollouts end in bursts, and a short step may have none."""
    tokens: float = sum(row["throughput/gen_tokens_per_s"] * row["time/step_s"] for row in recent)
    seconds: float = sum(row["time/step_s"] for row in recent)
    return tokens / max(seconds, 1e-9)


class _Failures:
    """Notices on failures and on steps without a learning signal, over the rows of this launch."""

    def __init__(self) -> None:
        self._flat = FlatSteps()
        self.rollouts: Counter[str] = Counter()
        self.episodes: Counter[str] = Counter()

    def take(self, row: Row) -> list[str]:
        """Return the notices on `row`."""
        notices = []
        for name, figures in evaluations(row).items():
            evaluation = f"the evaluation of version {row['step']:.0f} on {name}"
            if "failed" in figures:
                notices.append(f"{evaluation} failed; the master_worker's log says why")
            elif "cut_short" in figures:
                notices.append(f"{evaluation} had not ended when the run was stopped: it has no result")
        for name, value in row.items():
            reason = name.removeprefix(DROPPED)
            if reason != name and (what := failure(reason)) is not None and (count := int(value)):
                self.rollouts[reason] += count
                notices.append(
                    f"{count} rollouts failed {what}, {self.rollouts[reason]} since the start; the rollout_workers' "
                    "logs say why"
                )
        for name, count in lost_episodes(row).items():
            self.episodes[name] += count
            notices.append(
                f"{count} episodes were lost, as {name}, {self.episodes[name]} since the start; the rollout_workers' "
                "logs say why"
            )
        if (warning := self._flat.take(row)) is not None:
            notices.append(warning)
        return notices


class PlainDisplay:
    """A line per step, for logs and pipes."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total = total_steps
        self._failures = _Failures()
        self._begun, self._shown_status = False, [""]
        self._recent: deque[Row] = deque(maxlen=_RECENT)
        self._line_at, self._outlook = time.monotonic(), ""

    def note(self, text: str) -> None:
        """Print the notice."""
        self._console.print(text, markup=False, soft_wrap=True)

    def row(self, row: Row) -> None:
        """Print a step's main figures; step 0 has evaluations only."""
        parts = [f"step {row['step']:.0f}/{self._total}"]
        if "reward/mean" in row:
            self._recent.append(row)
            parts += [
                f"reward {row['reward/mean']:.3f}",
                f"staleness {row['staleness/mean']:.1f} (max {row['staleness/max']:.0f})",
                f"gen {generated_per_s(self._recent):,.0f}",
                f"train {row['throughput/train_tokens_per_s']:,.0f} tok/s",
                f"{row['time/step_s']:.2f} s",
            ]
        parts += [f"{name} {value:.3f}" for name, value in main_figures(row).items()]
        self._console.print("  ".join(parts), markup=False, soft_wrap=True)
        self._line_at = time.monotonic()
        self._begun = self._begun or "reward/mean" in row
        for notice in self._failures.take(row):
            self.note(notice)

    def outlook(self, text: str) -> None:
        """Print it if there was no line for a while."""
        if text and text != self._outlook and time.monotonic() - self._line_at >= _OUTLOOK_S:
            self._line_at, self._outlook = time.monotonic(), text
            self.note(f"  {text}")

    def stage_lines(self, lines: Sequence[StatusLine]) -> None:
        """Print the processes' activities whenever they change, until the first step."""
        texts = [line.text for line in lines]
        if not self._begun and texts != self._shown_status:
            self._shown_status = texts
            for line in lines:
                self.note(f"  {line}")

    def close(self) -> None:
        """Do nothing: no resource is held."""


class _Panel:
    """The figures of a run so far, as a panel.

    Args:
        eta: `max_head_offpolicyness`.
        failures: counts of failed rollouts.

    Attributes:
        doctor: the command that says what sets the pace; empty: it is not shown.
        stage_lines: lines below the figures: the state of the run.
        outlook: how far the step at hand is.
    """

    def __init__(self, title: str, total_steps: int, eta: int, failed: Mapping[str, int], doctor: str) -> None:
        self._title, self._total, self._eta, self._failed, self.doctor = title, total_steps, eta, failed, doctor
        self.stage_lines: Sequence[StatusLine] = ()
        self.outlook = ""
        self._recent: deque[Row] = deque(maxlen=_RECENT)
        self._rewards: list[float] = []
        self._evaluated: dict[str, list[float]] = {}
        self._started = time.monotonic()
        self._first_step: tuple[float, float] | None = None

    def add(self, row: Row) -> None:
        """Add a row of metrics; the row of step 0 has only evaluations."""
        for name, value in main_figures(row).items():
            self._evaluated.setdefault(name, []).append(value)
        if "reward/mean" not in row:
            return
        if self._first_step is None:
            self._first_step = (row["step"], time.monotonic())
            self.stage_lines = ()  # it describes the time before the first step
        self._recent.append(row)
        self._rewards.append(row["reward/mean"])

    def render(self) -> RenderableType:
        """Return the panel of the newest row, for rich."""
        body: list[RenderableType] = [self._progress(), self._figures(self._recent[-1] if self._recent else {})]
        enough = self.doctor and not self.stage_lines and len(self._recent) >= FEWEST_STEPS
        lines = (self.outlook, *self.stage_lines, f"pace: {self.doctor}" if enough else "")
        body += [Text(str(line), style="dim") for line in lines if line]
        title = Text(self._title, style="bold", overflow="ellipsis")
        return Panel(Group(*body), title=title, title_align="left", border_style="cyan", padding=(0, 1))

    def _progress(self) -> Table:
        step = self._recent[-1]["step"] if self._recent else 0.0
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        times = f"{_clock(time.monotonic() - self._started)} elapsed"
        if not self.outlook and self._first_step is not None and step > self._first_step[0]:  # else it says when
            first, since = self._first_step
            rate = (step - first) / (time.monotonic() - since)
            times += f" · {_clock((self._total - step) / rate)} left"
        # a continued run has some steps behind it, but no row of them
        steps = f"step [bold]{step:.0f}[/]/{self._total}" if self._recent else f"{self._total} steps"
        grid.add_row(steps, ProgressBar(self._total, step), times)
        return grid

    def _figures(self, row: Row) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        if row:
            grid.add_row("reward", f"[bold]{row['reward/mean']:.3f}[/]  [cyan]{trend(self._rewards)}[/]")
        for name, values in self._evaluated.items():
            grid.add_row(name, f"[bold green]{values[-1]:.3f}[/]  [cyan]{trend(values)}[/]")
        if not row:
            return grid
        grid.add_row(
            "staleness", f"mean {row['staleness/mean']:.1f}, max {row['staleness/max']:.0f} of η = {self._eta}"
        )
        if "data/epoch" in row:
            grid.add_row("epoch", f"{row['data/epoch']:.0f}")
        grid.add_row(
            "tokens/s",
            f"generated {generated_per_s(self._recent):,.0f}, trained {row['throughput/train_tokens_per_s']:,.0f}",
        )
        waits = f"trainer for data {self._share('time/wait_for_batch_s')}"
        if "time/generation_idle_s" in row:
            waits += f", generation for training {self._share('time/generation_idle_s')}"
        grid.add_row("waiting", waits)
        if self._failed:
            counts = ", ".join(f"{count} {reason}" for reason, count in self._failed.items())
            grid.add_row("failed", f"[bold red]{counts}[/]")
        return grid

    def _share(self, key: str) -> str:
        seconds = max(sum(row["time/step_s"] for row in self._recent), 1e-9)
        return f"{100 * sum(row.get(key, 0.0) for row in self._recent) / seconds:.0f} %"


class LiveDisplay:
    """One panel, redrawn in place.

    A thread redraws the panel, so that its clock keeps running. Each frame begins by moving the cursor up by the height
    of the previous frame. A notice printed in between would leave lines of the old panel if the height changed. So one
    lock covers a whole frame, a notice, and a change of the content. rich's own thread has no lock around printing.
    """

    def __init__(self, console: Console, title: str, total_steps: int, eta: int, doctor: str = "") -> None:
        self._failures = _Failures()
        self._panel = _Panel(title, total_steps, eta, self._failures.rollouts, doctor)
        self._live = Live(get_renderable=self._panel.render, console=console, auto_refresh=False, transient=False)
        self._restore_keys = silence_keys(console.file)
        self._live.start()
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._redrawing = threading.Thread(target=self._redraw, name="display", daemon=True)
        self._redrawing.start()

    def note(self, text: str) -> None:
        """Print the notice above the panel."""
        # A group, because options of `print` would also apply to the panel that is redrawn below the notice, and
        # because `print` joins several texts into one without options.
        notice = Text(wrapped(text, self._live.console), no_wrap=True, overflow="ignore")
        with self._lock:
            self._live.console.print(Group(notice), crop=False)

    def row(self, row: Row) -> None:
        """Update the figures with a step's row."""
        with self._lock:
            notices = self._failures.take(row)
            self._panel.add(row)  # first, because each notice redraws the panel
            for notice in notices:
                self.note(notice)

    def stage_lines(self, lines: Sequence[StatusLine]) -> None:
        """Show the state of the run below the figures."""
        self._panel.stage_lines = lines

    def outlook(self, text: str) -> None:
        """Show it below the figures."""
        self._panel.outlook = text

    def close(self) -> None:
        """Draw the last state and stop."""
        self._closed.set()
        self._redrawing.join()
        self._panel.stage_lines, self._panel.outlook, self._panel.doctor = (), "", ""
        try:
            self._live.stop()  # draws a last frame
        finally:
            self._restore_keys()

    def _redraw(self) -> None:
        while not self._closed.wait(_REFRESH_S):
            with self._lock:
                self._live.refresh()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    return f"{minutes:d}:{rest:02d}"


def silence_keys(terminal: IO[str]) -> Callable[[], None]:
    """Stop `terminal` from echoing typed keys; return the function that restores its modes.

    An echoed `^C` or Enter moves the cursor by a line. A panel that is drawn in place would then leave a line of its
    last frame. Ctrl-C still interrupts. Nothing is changed if `terminal` is no terminal, or while another process
    group has it: the kernel stops a background process that changes modes.
    """
    try:
        descriptor = terminal.fileno()
        modes = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):
        return lambda: None
    silent = list(modes)
    silent[_LOCAL_MODES] &= ~termios.ECHO
    _set_modes(descriptor, silent)
    return lambda: _set_modes(descriptor, modes)


def _set_modes(descriptor: int, modes: list[int | list[bytes | int]]) -> None:
    try:
        if os.tcgetpgrp(descriptor) == os.getpgrp():
            termios.tcsetattr(descriptor, termios.TCSADRAIN, modes)
    except (OSError, termios.error):
        return  # the terminal was closed, or is another process group's now
