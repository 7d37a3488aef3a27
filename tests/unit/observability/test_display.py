"""The displays show what a row says, on a terminal and elsewhere."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from asyncrl.observability.display import LiveDisplay, PlainDisplay, evaluations, trend
from asyncrl.observability.tail import JsonlTail

ROW = {
    "step": 3.0,
    "reward/mean": 0.25,
    "staleness/mean": 1.5,
    "staleness/max": 2.0,
    "throughput/gen_tokens_per_s": 1234.0,
    "throughput/train_tokens_per_s": 5678.0,
    "time/step_s": 0.5,
    "time/wait_data_s": 0.1,
    "time/gate_closed_s": 0.05,
    "eval/held_out/accuracy": 0.75,
}


def console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=120, force_terminal=False), out


def test_a_plain_row_is_one_line_with_the_main_figures() -> None:
    shown, out = console()
    PlainDisplay(shown, total_steps=10).row(ROW)
    assert out.getvalue().count("\n") == 1
    for part in ("step 3/10", "reward 0.250", "max 2", "gen 1,234", "train 5,678", "held_out accuracy 0.750"):
        assert part in out.getvalue()


def test_the_live_panel_shows_progress_staleness_and_who_waits_for_whom() -> None:
    shown, out = console()
    display = LiveDisplay(shown, "asyncrl a/b", total_steps=10, eta=4)
    display.row(ROW)
    display.close()
    text = out.getvalue()
    for part in ("asyncrl a/b", "step 3/10", "0.250", "max 2 of η = 4", "0.750", "trainer for data 20 %", "gate 10 %"):
        assert part in text


def test_markup_in_a_remark_is_shown_as_it_is() -> None:
    shown, out = console()
    PlainDisplay(shown, 1).note("log [/red] line")
    assert "log [/red] line" in out.getvalue()


def test_a_trend_rises_from_the_lowest_to_the_highest_bar() -> None:
    assert trend([0.0, 1.0]) == "▁█"
    assert trend([0.5, 0.5]) == "▁▁"
    assert len(trend([float(i) for i in range(100)])) == 24
    assert trend([]) == ""


def test_evaluations_are_told_by_the_name_of_their_set() -> None:
    assert evaluations(ROW) == {"held_out": 0.75}


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
