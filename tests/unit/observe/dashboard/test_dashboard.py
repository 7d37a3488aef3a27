"""The dashboard's data, page and server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncrl.launch.__main__ import main
from asyncrl.launch.commands.dashboard import token_of
from asyncrl.observe.dashboard import (
    MOST_POINTS,
    SCRIPTS,
    STYLES,
    TIMELINE_SPANS,
    UPLOT_SHA256,
    Dashboard,
    html,
    page_data,
    static,
)
from asyncrl.observe.history import History
from asyncrl.observe.timeline import OTHER, PHASES
from tests.unit.observe.doctor.virtual_run import Knobs, VirtualRun

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "mine" / "trial0"
    VirtualRun(Knobs(steps=12), folder).play()
    return folder


def test_the_data_has_what_the_page_shows(run: Path) -> None:
    data = page_data(History(run))
    assert (data["name"], data["step"], data["total"], data["state"]) == ("mine/trial0", 12, 12, "finished")
    assert data["series"]["step"] == list(range(1, 13))
    assert len(data["series"]["reward/mean"]) == 12
    assert all(sum(share) == pytest.approx(1.0, abs=1e-4) for share in data["ages"]["shares"])
    assert data["doctor"]["findings"]
    assert data["meanings"]["reward/mean"].startswith("reward/mean: Mean reward of the batch's episodes")
    assert {"steps", "trainer", "rollout_worker/0"} <= set(data["timeline"]["tracks"])
    assert data["samples"]["why"].startswith("no samples were kept; samples.every=16")
    json.dumps(data, allow_nan=False)


def test_the_page_has_a_colour_for_each_phase_of_a_step() -> None:
    """Else a phase is told as the rest of the step."""
    table = re.search(r"const PHASES = \{(.*?)\n\};", static("parts.js"), re.DOTALL)
    assert table is not None
    assert re.findall(r"^  (\w+):", table[1], re.MULTILINE) == [*PHASES, OTHER]


def test_servers_of_other_policies_are_told_with_their_policy(run: Path) -> None:
    config = json.loads((run / "config.yaml").read_text())
    config["policies"] = [{"name": "past", "servers": 2}, {"name": "judge", "servers": 1}]
    (run / "config.yaml").write_text(json.dumps(config))
    own = (run / "observed" / "generation_server-0.jsonl").read_text()
    (run / "observed" / "policy_server-2.jsonl").write_text(own)
    reported = {each["name"]: each["policy"] for each in page_data(History(run))["processes"]}
    assert reported == {"generation_server/0": "", "policy_server/2": "judge"}


def test_numbers_that_are_none_become_null(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[3]["loss"] = float("nan")
    rows[4]["loss"] = 0.123456789
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loss = page_data(History(run))["series"]["loss"]
    assert (loss[3], loss[4], loss[5]) == (None, 0.123457, None)


def test_the_size_does_not_grow_with_the_run(run: Path) -> None:
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 20_001):
            evaluated = {"eval/held_out/accuracy": 0.5} if step % 5 == 0 else {}
            file.write(json.dumps(row | {"step": step} | evaluated) + "\n")
    data = page_data(History(run))
    assert len(data["series"]["step"]) <= 2 * MOST_POINTS
    assert data["series"]["step"][-1] == 20_000
    assert sum(value is not None for value in data["series"]["eval/held_out/accuracy"]) > MOST_POINTS / 2
    assert len(data["timeline"]["spans"]) <= TIMELINE_SPANS


def test_a_run_without_a_step_can_be_shown(tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "trial0"
    VirtualRun(Knobs(steps=0), folder).play()
    data = page_data(History(folder))
    assert data["timeline"] is None
    assert data["series"] == {"step": []}


def test_hostile_text_stays_text_in_the_page(run: Path) -> None:
    (run / "logs").mkdir()
    (run / "logs" / "master_worker-0.log").write_text(HOSTILE)
    page = html([page_data(History(run))])
    assert HOSTILE not in page
    assert page.count("</script>") == 1 + len(SCRIPTS)
    data = re.search(r"<script>const DATA = (.*?);</script>", page)
    assert data is not None
    assert json.loads(data[1])[0]["logs"]["master_worker-0"] == HOSTILE


def test_the_page_parses_no_text_as_html_and_reaches_nobody() -> None:
    own = [static(name) for name in SCRIPTS if name not in UPLOT_SHA256]
    for script in own:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", script)
    for name in (*SCRIPTS, *STYLES, "body.html"):
        if name not in UPLOT_SHA256:
            assert not re.search(r"https?://", static(name)), name
    assert "default-src 'none'" in html(None)


def test_uplot_is_the_pinned_one() -> None:
    assert {name: hashlib.sha256(static(name).encode()).hexdigest() for name in UPLOT_SHA256} == UPLOT_SHA256
    assert "MIT" in static("uPlot.LICENSE")


def served(run: Path, asking: Callable[[aiohttp.ClientSession, str], Awaitable[Any]]) -> Any:
    async def ask() -> Any:
        dashboard = Dashboard([History(run)], [None], token="secret", host="127.0.0.1")
        url = await dashboard.start(0)
        try:
            async with aiohttp.ClientSession() as session:
                return await asking(session, url)
        finally:
            await dashboard.close()

    return asyncio.run(ask())


def test_data_needs_the_token_and_the_page_does_not(run: Path) -> None:
    async def statuses(session: aiohttp.ClientSession, url: str) -> list[int]:
        found = []
        for path, token in (("/", ""), ("/api/runs", ""), ("/api/runs", "wrong"), ("/api/runs", "secret")):
            async with session.get(url + path, headers={"Authorization": f"Bearer {token}"}) as answer:
                found.append(answer.status)
                if path == "/":
                    assert "mine/trial0" not in await answer.text()
        return found

    assert served(run, statuses) == [200, 401, 401, 200]


def test_prometheus_gets_the_metrics_of_the_run_with_the_token(run: Path) -> None:
    async def scraped(session: aiohttp.ClientSession, url: str) -> list[tuple[int, str, str]]:
        found = []
        for token in ("wrong", "secret"):
            async with session.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"}) as answer:
                found.append((answer.status, answer.content_type, await answer.text()))
        return found

    (refused, _, _), (status, kind, text) = served(run, scraped)
    assert (refused, status, kind) == (401, 200, "text/plain")
    assert 'asyncrl_step{run="mine/trial0"} 12.0' in text
    assert 'asyncrl_process_busy_s_total{process="generation_server/0",run="mine/trial0"}' in text


@pytest.mark.parametrize("content", [b"short", b"\xff" * 32])
def test_a_token_file_without_a_token_is_refused_by_name(
    content: bytes, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    assert main(["dashboard", str(run), "--token-file", str(file)]) == 2
    assert f"--token-file {file}" in capsys.readouterr().err


def test_a_token_file_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "token"
    made = token_of(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert token_of(file) == made
    assert len({token_of(None), token_of(None), made}) == 3


def test_what_has_not_changed_is_not_sent_again(run: Path) -> None:
    async def twice(session: aiohttp.ClientSession, url: str) -> tuple[Any, Any, Any]:
        headers = {"Authorization": "Bearer secret"}
        async with session.get(f"{url}/api/runs", headers=headers) as answer:
            first = await answer.json()
        async with session.get(f"{url}/api/runs?seen={first['version']}", headers=headers) as answer:
            second = await answer.json()
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 13, "loss": 1.0}\n')
        async with session.get(f"{url}/api/runs?seen={first['version']}", headers=headers) as answer:
            return first, second, await answer.json()

    first, second, third = served(run, twice)
    assert first["runs"][0]["name"] == "mine/trial0"
    assert second == {"version": first["version"], "runs": None}
    assert third["runs"][0]["series"]["step"][-1] == 13


def test_a_report_is_one_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    assert main(["dashboard", str(run), "--report", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>")
    assert "open it in a browser" in capsys.readouterr().out


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "example.org"])
def test_an_address_that_others_reach_is_refused(host: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", str(run), "--host", host]) == 2
    assert "ssh -L" in capsys.readouterr().err
