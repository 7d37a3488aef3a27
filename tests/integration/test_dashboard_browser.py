"""The dashboard in a real browser: every tab of a live, a finished and a crashed run and of a report, on a desk and on
a phone, light and dark, with hostile text in whatever a run's files say.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.comm import names
from asyncrl.comm.files import FileLock
from asyncrl.observe.dashboard import Dashboard, html, page_data
from asyncrl.observe.history import History
from asyncrl.observe.samples import rows_of, write_samples
from tests.unit.observe.doctor.virtual_run import Knobs, VirtualRun

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")

LIMIT_MS = 60_000
PAGES = ("Overview", "Learning", "Speed", "Samples", "Health")
PHONE = {"viewport": {"width": 390, "height": 800}}
LOOKS: dict[str, dict[str, Any]] = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "phone": PHONE,
    "dark phone": {"color_scheme": "dark"} | PHONE,
}
HOSTILE = "<img src=x onerror=\"document.title='taken'\"></script>"
NAME = "<img src=x onerror=document.title=0>"
"""As hostile, and a name that a folder may have."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the dev extra")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=LIMIT_MS)
        yield opened
        opened.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run in whose files everything that a stranger may have written is hostile."""
    pytest.importorskip("pyarrow")
    folder = tmp_path / NAME / "trial0"
    VirtualRun(Knobs(steps=12, eval_samples=50), folder).play()
    (folder / "logs").mkdir()
    (folder / "logs" / "master_worker-0.log").write_text(HOSTILE)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    drop = {"kind": "dropped", "reason": f"failed: reward {HOSTILE}", "at": 1.0}
    ledger = (folder / "ledger" / "000001.jsonl").read_text().replace("rollout_worker/0", NAME).splitlines()
    drops = [json.dumps(drop | {"rollout": f"r{number}"}) for number in range(9)]
    files = {
        "metrics.jsonl": [json.dumps(row | {f"reward/{HOSTILE}": 0.5}) for row in rows],
        "restarts.jsonl": [json.dumps({"time": 2.0, "restarted": "model_worker/0", "reason": HOSTILE})],
        "remarks.jsonl": [json.dumps({"remark": HOSTILE})],
        "config.yaml": [json.dumps(json.loads((folder / "config.yaml").read_text()) | {"note": HOSTILE})],
        "ledger/000001.jsonl": [ledger[0], *drops, *ledger[1:]],
    }
    for name, lines in files.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    tokens = np.frombuffer(HOSTILE.encode(), np.uint8).astype(np.int32)
    generated = np.arange(len(tokens)) % 2
    sample = Sample(
        tokens, generated.astype(np.uint8), np.full(len(tokens), -0.5, np.float32), generated.astype(np.int32) - 1, 0.5,
        reward_parts={HOSTILE: 0.5},
    )  # fmt: skip
    kept = rows_of(Trajectory("r1", HOSTILE, 1, [sample], {}), 3, lambda ids: bytes(ids).decode(), {})
    write_samples(folder / "samples", 3, "head-0", kept, 1 << 30)
    return folder


@contextmanager
def in_state(run: Path, state: str) -> Iterator[None]:
    """The run's files as they are while it is `live`, or once it has `finished` or `crashed`."""
    if state != "finished":
        (run / "summary.json").unlink()
    if state != "live":
        yield
        return
    holder = names.TrialHolder("x", socket.gethostname(), "m", os.getpid(), 1, "now", str(run))
    (run / "lock").write_text(holder.encode())
    lock = FileLock(run / "lock")
    assert lock.take()
    yield
    lock.close()


@contextmanager
def opened(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page at `url`; at the end there must have been no error on it."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(LIMIT_MS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(url)
    page.wait_for_selector(".card")
    yield page
    title = page.title()
    context.close()
    assert errors == []
    assert title == "asyncrl"


def look_through(page: Any) -> dict[str, str]:
    """The text of each tab, chosen by its key; nothing of a run is an element in it, and it fits the screen."""
    texts = {}
    for key, name in enumerate(PAGES, 1):
        page.keyboard.press(str(key))
        page.wait_for_function("name => document.querySelector('[aria-selected=true]').textContent === name", arg=name)
        texts[name] = page.inner_text("main")
        assert page.locator("img[src=x]").count() == 0, name
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    return texts


def report(tmp_path: Path, *runs: Path) -> str:
    file = tmp_path / "report.html"
    file.write_text(html([page_data(History(run)) for run in runs]))
    return file.as_uri()


@contextmanager
def served(run: Path) -> Iterator[str]:
    """The address of a dashboard on a thread of its own."""
    ready, stop = threading.Event(), threading.Event()
    found: list[str] = []

    async def serve() -> None:
        dashboard = Dashboard([History(run)], [None], token="secret", host="127.0.0.1")
        found.append(await dashboard.start(0))
        ready.set()
        await asyncio.to_thread(stop.wait)
        await dashboard.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(LIMIT_MS / 1000)
    try:
        yield f"{found[0]}/#token=secret"
    finally:
        stop.set()
        thread.join()


STATES = {"live": "running", "finished": "finished", "crashed": "died"}


@pytest.mark.parametrize(
    ("state", "source", "look"),
    [
        ("live", "server", "light"),
        ("finished", "server", "dark phone"),
        ("crashed", "server", "light"),
        *(("crashed", "report", look) for look in LOOKS),
        ("live", "report", "light"),
    ],
)
def test_every_tab_shows_what_the_files_say_and_parses_none_of_it(
    browser: Any, run: Path, tmp_path: Path, state: str, source: str, look: str
) -> None:
    from_server = source == "server"
    with (
        in_state(run, state),
        served(run) if from_server else nullcontext(report(tmp_path, run)) as url,
        opened(browser, url, **LOOKS[look]) as page,
    ):
        page.wait_for_selector(f"#state >> text={'live' if from_server else 'report'}")
        assert f"{NAME}/trial0 {STATES[state]}" in page.inner_text("#runs")
        texts = look_through(page)
    assert f"12 of 12, {STATES[state]}" in texts["Overview"].replace("\n", " ")
    assert "The run ended without a summary" in texts["Overview"] or state != "crashed"
    assert "Gradient norm" in texts["Learning"]
    assert f"reward/{HOSTILE}" in texts["Learning"]
    assert "Timeline" in texts["Speed"]
    assert texts["Samples"].count(HOSTILE) == 3, "its prompt, a part of its reward, its text"
    assert texts["Health"].count(HOSTILE) >= 3, "a restart, a notice, a log"


def test_a_live_run_is_followed(browser: Any, run: Path) -> None:
    with in_state(run, "live"), served(run) as url, opened(browser, url) as page:
        page.wait_for_selector("text=live")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 13, "time/step_s": 1.0, "reward/mean": 0.5, "brand/new": 7.0}\n')
        page.keyboard.press("2")
        page.wait_for_selector("text=brand/new")


def test_a_wrong_token_is_told(browser: Any, run: Path) -> None:
    with served(run) as url:
        context = browser.new_context()
        page = context.new_page()
        page.goto(url.replace("secret", "wrong"), timeout=LIMIT_MS)
        page.wait_for_selector("text=the token is wrong", timeout=LIMIT_MS)
        context.close()


def test_a_run_without_a_step_is_shown(browser: Any, tmp_path: Path) -> None:
    empty = tmp_path / "other" / "trial0"
    VirtualRun(Knobs(steps=0), empty).play()
    (empty / "summary.json").unlink()
    with opened(browser, report(tmp_path, empty)) as page:
        texts = look_through(page)
    assert "No complete step yet" in texts["Overview"]
    assert "no samples were kept" in texts["Samples"]


def test_several_runs_are_laid_over_and_their_settings_compared(browser: Any, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "trial0"
    VirtualRun(Knobs(steps=8, slots=7), other).play()
    with opened(browser, report(tmp_path, run, other)) as page:
        page.keyboard.press("2")
        differences = page.inner_text("text=Settings that differ >> xpath=..")
        assert "rollout.max_concurrent" in differences
        page.click("#runs button >> nth=0")
        assert "Settings that differ" not in page.inner_text("main")


def test_the_timeline_zooms_and_tells_what_is_pointed_at(browser: Any, run: Path, tmp_path: Path) -> None:
    with opened(browser, report(tmp_path, run)) as page:
        page.keyboard.press("3")
        canvas = page.locator("section:has-text('Timeline') canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 10)
        page.mouse.wheel(0, -400)
        deadline = time.monotonic() + LIMIT_MS / 1000
        while not page.inner_text("#tip").startswith("step "):
            assert time.monotonic() < deadline
            page.mouse.move(box["x"] + box["width"] / 2 + (time.monotonic() % 1) * 40, box["y"] + 10)
