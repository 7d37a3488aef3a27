"""The dashboard in a real browser: every page of runs that go on, have ended, have died and have not begun."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.comm import names
from asyncrl.comm.files.file_lock import take_lock
from asyncrl.observe.dashboard.page import html
from asyncrl.observe.dashboard.page_data import page_data
from asyncrl.observe.dashboard.server import Dashboard
from asyncrl.observe.history import History
from tests.unit.observe.doctor.virtual_run import Knobs, VirtualRun

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the dev extra")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")

LIMIT_MS = 60_000
PAGES = ("Overview", "Learning", "Speed", "Samples", "Health")
HOSTILE = "<img src=x onerror=\"document.title='taken'\"></script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=LIMIT_MS)
        yield opened
        opened.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "mine" / "trial0"
    VirtualRun(Knobs(steps=12, eval_samples=50), folder).play()
    (folder / "logs").mkdir()
    (folder / "logs" / "master_worker-0.log").write_text(HOSTILE)
    return folder


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
    """The text of each page, by its key on the keyboard."""
    texts = {}
    for key, name in enumerate(PAGES, 1):
        page.keyboard.press(str(key))
        page.wait_for_function("name => document.querySelector('[aria-selected=true]').textContent === name", arg=name)
        texts[name] = page.inner_text("main")
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
    assert ready.wait(30)
    try:
        yield f"{found[0]}/#token=secret"
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    "options",
    [{}, {"color_scheme": "dark"}, {"viewport": {"width": 390, "height": 800}}],
    ids=["light", "dark", "phone"],
)
def test_every_page_of_a_report_is_drawn(browser: Any, run: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with opened(browser, report(tmp_path, run), **options) as page:
        texts = look_through(page)
        wide = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert "12 of 12, finished" in texts["Overview"].replace("\n", " ")
    assert "Gradient norm" in texts["Learning"]
    assert "Timeline" in texts["Speed"]
    assert "no samples were kept" in texts["Samples"]
    assert HOSTILE in texts["Health"]
    assert wide


def test_a_live_run_is_followed(browser: Any, run: Path) -> None:
    (run / "summary.json").unlink()
    holder = names.TrialHolder("x", socket.gethostname(), "m", os.getpid(), 1, "now", str(run))
    (run / "lock").write_text(holder.encode())
    lock = os.open(run / "lock", os.O_RDWR)
    assert take_lock(lock)
    with served(run) as url, opened(browser, url) as page:
        page.wait_for_selector("text=live")
        assert "running" in page.inner_text("#runs")
        look_through(page)
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 13, "time/step_s": 1.0, "reward/mean": 0.5, "brand/new": 7.0}\n')
        page.keyboard.press("2")
        page.wait_for_selector("text=brand/new")
    os.close(lock)


def test_a_wrong_token_is_told(browser: Any, run: Path) -> None:
    with served(run) as url:
        context = browser.new_context()
        page = context.new_page()
        page.goto(url.replace("secret", "wrong"), timeout=LIMIT_MS)
        page.wait_for_selector("text=the token is wrong", timeout=LIMIT_MS)
        context.close()


def test_a_run_that_died_and_one_without_a_step_are_shown(browser: Any, run: Path, tmp_path: Path) -> None:
    (run / "summary.json").unlink()
    with opened(browser, report(tmp_path, run)) as page:
        assert "The run ended without a summary" in look_through(page)["Overview"]
    empty = tmp_path / "other" / "trial0"
    VirtualRun(Knobs(steps=0), empty).play()
    (empty / "summary.json").unlink()
    with opened(browser, report(tmp_path, empty)) as page:
        assert "No complete step yet" in look_through(page)["Overview"]


def test_several_runs_are_laid_over_and_their_settings_compared(browser: Any, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "trial0"
    VirtualRun(Knobs(steps=8, places=7), other).play()
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
        deadline = time.monotonic() + 30
        while not page.inner_text("#tip").startswith("step "):
            assert time.monotonic() < deadline
            page.mouse.move(box["x"] + box["width"] / 2 + (time.monotonic() % 1) * 40, box["y"] + 10)
