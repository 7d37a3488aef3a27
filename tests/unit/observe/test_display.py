"""The displays show what a row says, on a terminal and elsewhere."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.observe.display import LiveDisplay, PlainDisplay, main_figures, trend, wrapped
from asyncrl.observe.status import StatusLine
from asyncrl.observe.tail import JsonlTail

ROW = {
    "step": 3.0,
    "reward/mean": 0.25,
    "staleness/mean": 1.5,
    "staleness/max": 2.0,
    "throughput/gen_tokens_per_s": 1234.0,
    "throughput/train_tokens_per_s": 5678.0,
    "time/step_s": 0.5,
    "time/wait_for_batch_s": 0.1,
    "time/generation_idle_s": 0.05,
    "eval/held_out/accuracy": 0.75,
}


EVALUATION = {"step": 0, "policy_version": 0, "eval/held_out/accuracy": 0.125}
"""A row as it is before training."""


def console(width: int = 120) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=False), out


def panel(*rows: dict[str, float], width: int = 80) -> str:
    """Return the text that a terminal of `width` columns shows after `rows`."""
    shown, out = console(width)
    display = LiveDisplay(shown, "asyncrl a/b", total_steps=10, eta=4)
    for row in rows:
        display.row(row)
    display.close()
    return out.getvalue()


def test_a_plain_row_is_one_line_with_the_main_figures() -> None:
    shown, out = console()
    PlainDisplay(shown, total_steps=10).row(ROW)
    assert out.getvalue().count("\n") == 1
    for part in ("step 3/10", "reward 0.250", "max 2", "gen 1,234", "train 5,678", "held_out accuracy 0.750"):
        assert part in out.getvalue()


def test_the_live_panel_shows_progress_staleness_and_who_waits_for_whom() -> None:
    text = panel(ROW)
    for part in (
        "asyncrl a/b",
        "step 3/10",
        "0.250",
        "max 2 of η = 4",
        "0.750",
        "trainer for data 20 %",
        "generation for training 10 %",
    ):
        assert part in text


@pytest.mark.parametrize("outlook", ["", "step 5 of 10 trains, complete in about 8 s; the run in about 13 min"])
def test_the_end_of_the_run_is_foretold_once(outlook: str) -> None:
    shown, out = console()
    display = LiveDisplay(shown, "asyncrl a/b", total_steps=10, eta=4)
    display.row(ROW)
    display.row(ROW | {"step": 4.0})
    display.outlook(outlook)
    out.truncate(0)
    shown.print(display._panel.render())
    drawn = out.getvalue()
    display.close()
    assert (" left" in drawn) == (outlook == "")
    assert outlook in drawn


def test_the_live_panel_fits_80_columns_whatever_the_figures() -> None:
    shares = {"time/step_s": 100.0, "time/wait_for_batch_s": 100.0, "time/generation_idle_s": 100.0}
    rates = {"throughput/gen_tokens_per_s": 1234567.0, "throughput/train_tokens_per_s": 7654321.0}
    text = panel(*[ROW | shares | rates | {"reward/mean": -12.5} for _ in range(30)])
    assert "trainer for data 100 %, generation for training 100 %" in text
    assert "generated 1,234,567, trained 7,654,321" in text
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert len(text.splitlines()) == len(panel(ROW).splitlines()), "no figure takes a second line"


def test_what_processes_did_before_the_first_step_is_not_shown_after_it() -> None:
    shown, out = console(80)
    display = LiveDisplay(shown, "asyncrl a/b", total_steps=10, eta=4)
    display.stage_lines([StatusLine("generation_server/0 loads the model", 3.0)])
    display.row(EVALUATION)
    display.row(ROW)
    shown.print(display._panel.render())
    assert "loads the model" not in out.getvalue()
    display.stage_lines([StatusLine("The run is stalled: no step since 500 s, after step 3.")])
    shown.print(display._panel.render())
    assert "The run is stalled" in out.getvalue()
    display.close()


DOCTOR = "python -m asyncrl.launch doctor ~/.cache/asyncrl/async_ppo/trial0"


def test_on_80_columns_the_lines_below_the_figures_follow_the_run() -> None:
    """What each process does; from the third step on the command that says what sets the pace; a standstill in its
    place.
    """
    out = io.StringIO()
    shown = Console(file=out, width=80, force_terminal=False)
    display = LiveDisplay(shown, "asyncrl async_ppo/trial0", total_steps=10, eta=4, doctor=DOCTOR)

    def below(figure: str) -> list[str]:
        """The lines that are drawn below the last one with `figure`."""
        out.seek(out.truncate(0))
        shown.print(display._panel.render())
        lines = out.getvalue().splitlines()
        assert {len(line) for line in lines} == {80}
        return [line.strip("│ ") for line in lines[max(n for n, line in enumerate(lines) if figure in line) + 1 : -1]]

    display.outlook("step 1 of 10: 2 of 8 rollouts are ready")
    display.stage_lines([StatusLine("generation_server/0 loads the model", 5.0)])
    assert below(" elapsed") == ["step 1 of 10: 2 of 8 rollouts are ready", "generation_server/0 loads the model (5 s)"]
    for step in (1.0, 2.0):
        display.row(ROW | {"step": step})
    display.stage_lines([])
    display.outlook("step 3 of 10 trains, complete in about 8 s; the run in about 1 min")
    assert below("waiting") == ["step 3 of 10 trains, complete in about 8 s; the run in about 1 min"], "too few steps"
    display.row(ROW)
    display.outlook("")
    assert below("waiting") == [f"pace: {DOCTOR}"], "it fits a line"
    is_stalled = "The run is stalled: no step since 500 s, after step 3; all processes wait."
    display.stage_lines([StatusLine(is_stalled)])
    assert " ".join(below("waiting")) == is_stalled
    display.close()
    assert "pace: " not in out.getvalue(), "the end of a run names the command once more"


def test_before_the_first_step_there_is_the_accuracy_of_the_initial_model_alone() -> None:
    text = panel(EVALUATION)
    for part in ("10 steps", "held_out accuracy", "0.125"):
        assert part in text
    assert "reward" not in text
    assert "step 0" not in text, "a continued run has made some"
    assert "▁█" in panel(EVALUATION, ROW), "the curve begins there"
    shown, out = console()
    PlainDisplay(shown, total_steps=10).row(EVALUATION)
    assert out.getvalue() == "step 0/10  held_out accuracy 0.125\n"


def test_a_failed_evaluation_is_said() -> None:
    failed = ROW | {"eval/held_out/failed": 1.0}
    del failed["eval/held_out/accuracy"]
    message = "the evaluation of version 3 on held_out failed"
    assert message in panel(failed)
    assert message in panel(EVALUATION, failed)
    shown, out = console()
    PlainDisplay(shown, total_steps=10).row(failed)
    assert out.getvalue().count("\n") == 2
    assert message in out.getvalue()


def test_an_evaluation_that_was_cut_short_by_the_end_of_the_run_has_not_failed() -> None:
    shown, out = console()
    PlainDisplay(shown, total_steps=10).row({"step": 0, "eval/held_out/cut_short": 1.0})
    assert "on held_out had not ended when the run was stopped" in out.getvalue()
    assert "failed" not in out.getvalue()


def test_lost_episodes_are_said_with_their_count_so_far() -> None:
    lost = "rollout/lost_episodes: env my.py:Game.step raised ValueError"
    shown, out = console()
    display = PlainDisplay(shown, total_steps=10)
    for step in (1, 2):
        display.row(ROW | {"step": float(step), lost: float(step)})
    message = "2 episodes were lost, as env my.py:Game.step raised ValueError, 3 since the start"
    assert message in out.getvalue().replace("\n", " ")


def test_rollouts_that_failed_are_said_with_their_count_so_far() -> None:
    rows = [
        ROW | {"step": float(step), "rollout/dropped_failed: reward my.py:score": float(step)} for step in (0, 1, 2)
    ]
    message = "2 rollouts failed in reward my.py:score, 3 since the start; the rollout_workers' logs say why"
    shown, out = console()
    display = PlainDisplay(shown, total_steps=10)
    for row in rows:
        display.row(row)
    assert message in out.getvalue()
    assert out.getvalue().count("rollouts failed") == 2
    text = panel(*rows)
    assert message in text.replace("\n", " ")
    assert "3 failed: reward my.py:score" in text
    assert "failed" not in panel(ROW)


def test_markup_in_a_notice_is_shown_as_it_is() -> None:
    shown, out = console()
    PlainDisplay(shown, 1).note("log [/red] line")
    assert "log [/red] line" in out.getvalue()


def test_a_trend_rises_from_the_lowest_to_the_highest_bar() -> None:
    assert trend([0.0, 1.0]) == "▁█"
    assert trend([0.5, 0.5]) == "▁▁"
    assert len(trend([float(i) for i in range(100)])) == 24
    assert trend([]) == ""


def test_each_set_is_told_by_its_name_with_accuracy_where_there_is_a_verdict() -> None:
    row = {"step": 3, "eval/a/accuracy": 0.75, "eval/a/reward_mean": 0.7, "eval/b.c/reward_mean": -0.5}
    row |= {"eval/d/failed": 1.0}
    assert main_figures(row) == {"a accuracy": 0.75, "b.c reward": -0.5}
    shown, out = console()
    PlainDisplay(shown, total_steps=10).row(row)
    assert out.getvalue().splitlines() == [
        "step 3/10  a accuracy 0.750  b.c reward -0.500",
        "the evaluation of version 3 on d failed; the master_worker's log says why",
    ]


def test_the_tail_reads_each_whole_line_once_and_survives_a_cut(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = JsonlTail(file)
    assert tail.read() == []
    file.write_text(json.dumps({"step": 1}) + "\n" + '{"step"')
    assert tail.read() == [{"step": 1}]
    with file.open("a") as out:
        out.write(": 2}\n")
    assert tail.read() == [{"step": 2}]
    file.write_text(json.dumps({"step": 9}) + "\n")
    assert tail.read() == [{"step": 9}]


@pytest.mark.parametrize("added", [1, 5])
def test_what_is_left_after_a_cut_is_not_read_again(tmp_path: Path, added: int) -> None:
    """Also where the file has grown beyond its former length before anybody looks."""
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "time": 0} for step in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tail = JsonlTail(file)
    assert tail.read() == rows
    trained_again = [{"step": 2 + number, "time": 1} for number in range(added)]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows[:2], *trained_again]))
    assert tail.read() == trained_again
    file.write_text(json.dumps(rows[0]) + "\n")
    assert tail.read() == []
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tail.read() == rows[1:]


def test_long_lines_break_between_words_on_a_terminal_alone_and_paths_stay_whole() -> None:
    path = "/a/long/path/" + "x" * 60
    line = f"metrics    {path} and some words that need a second line of a terminal"
    terminal = Console(file=io.StringIO(), width=40, force_terminal=True)
    parts = wrapped(line, terminal, indent=11).split("\n")
    assert f"           {path}" in parts
    assert all(len(part) <= 40 for part in parts if path not in part)
    assert " ".join(part.strip() for part in parts) == line.replace("    ", " ")
    assert wrapped("a\n\n  b", terminal) == "a\n\n  b"
    assert wrapped(line, console(40)[0]) == line


def test_rates_and_shares_are_those_of_the_recent_steps() -> None:
    """A short step in which no rollout ended does not say that nothing is generated."""
    burst = ROW | {"throughput/gen_tokens_per_s": 1000.0, "time/step_s": 0.9, "time/wait_for_batch_s": 0.9}
    quiet = ROW | {"throughput/gen_tokens_per_s": 0.0, "time/step_s": 0.1, "time/wait_for_batch_s": 0.0}
    text = panel(burst, quiet)
    assert "generated 900," in text
    assert "trainer for data 90 %" in text
    assert "generated 0," in panel(burst, *[quiet] * 10)
    shown, out = console()
    display = PlainDisplay(shown, 10)
    for row in (burst, quiet):
        display.row(row)
    assert ["gen 1,000  " in line or "gen 900  " in line for line in out.getvalue().splitlines()] == [True, True]


def test_what_processes_do_is_printed_again_only_when_it_changes() -> None:
    screen, out = console()
    display = PlainDisplay(screen, 10)
    display.stage_lines([StatusLine("generation_server/0 loads the model", 4.0)])
    display.stage_lines([StatusLine("generation_server/0 loads the model", 8.0)])
    display.stage_lines([StatusLine("all processes are at work: the first batch is being generated")])
    assert out.getvalue().splitlines() == [
        "  generation_server/0 loads the model (4 s)",
        "  all processes are at work: the first batch is being generated",
    ]


def test_the_panel_below_a_notice_is_drawn_as_elsewhere() -> None:
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, width=60, force_terminal=True, color_system=None), "run", 10, 4)
    display.note(
        "the notice [bold]with brackets[/] and /a/path/that/is/longer/than/a/line/of/this/terminal/is/wide.log"
    )
    below = out.getvalue().partition("with brackets")[2]
    display.close()
    assert "10 steps" in below
    assert "[bold]" not in below, "the panel's markup is text where a remark's options apply to it"
    assert "/a/path/that/is/longer/than/a/line/of/this/terminal/is/wide.log\n" in below


def test_no_frame_is_drawn_between_the_composition_of_a_notice_and_its_output() -> None:
    out = io.StringIO()
    drawn_amid: list[bool] = []
    noting = threading.Event()

    class SlowConsole(Console):
        """Takes long to write what the main thread has composed."""

        def __exit__(self, *error: Any) -> None:
            if noting.is_set() and threading.current_thread() is threading.main_thread():
                before = out.getvalue()
                time.sleep(0.6)  # more than two intervals of the panel
                drawn_amid.append(out.getvalue() != before)
            super().__exit__(*error)

    shown = SlowConsole(file=out, width=60, force_terminal=True, color_system=None)
    display = LiveDisplay(shown, "run", 10, 4)
    noting.set()
    display.note("the remark")
    noting.clear()
    display.close()
    assert drawn_amid == [False], "the notice moves the cursor by the height of a panel that is no longer there"
    assert "the remark" in out.getvalue()


def test_keys_are_restored_even_if_the_last_frame_cannot_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[bool] = []
    monkeypatch.setattr("asyncrl.observe.display.silence_keys", lambda terminal: lambda: restored.append(True))
    shown, _ = console()
    display = LiveDisplay(shown, "run", 10, 4)
    display.row({"step": 1, "reward/mean": 0.5})  # a row without the other figures
    with pytest.raises(KeyError):
        display.close()
    assert restored == [True]


def test_a_plain_display_says_how_far_the_step_is_once_a_minute_and_never_beside_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("asyncrl.observe.display.time.monotonic", lambda: now)
    printed = io.StringIO()
    display = PlainDisplay(Console(file=printed, width=80), total_steps=10)
    for seconds in range(0, 200, 10):
        now = float(seconds)
        display.outlook(f"step 1 of 10: {seconds} of 512 rollouts are ready")
    display.outlook("")
    assert printed.getvalue().splitlines() == [
        f"  step 1 of 10: {seconds} of 512 rollouts are ready" for seconds in (60, 120, 180)
    ]
