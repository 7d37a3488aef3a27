"""The pictures of the dashboard in docs/dashboard.md, from a run with evaluations and kept samples.

    python -m asyncrl.launch async_ppo samples.every=8
    python docs/screenshots.py ~/.cache/asyncrl/async_ppo/trial0 docs [--pages Overview Samples] [--dark]

It needs Debian's `chromium` and the package `playwright` (of the dev extra). Each page of the run's report is a
picture, `dashboard_<page>.png`; that of the overview is `dashboard.png`. Samples are of the newest step that has any,
and a picture for each of `COLOURS`, by which their tokens are coloured.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from asyncrl.launch.commands.dashboard import main as dashboard

PAGES = ("Overview", "Learning", "Speed", "Samples", "Health")
COLOURS = {"version": "", "log-probability": "_logprob"}
WIDTH, HEIGHT = 1440, 1000
SAMPLES_HEIGHT = 640


def samples(page: Page, file: Path) -> None:
    """Take the pictures of the samples of the newest step."""
    steps = page.locator("select option").all_inner_texts()
    if not steps:
        sys.exit("the run has kept no samples: run it with samples.every=8, or leave Samples out of --pages")
    page.select_option("select", label=steps[-1])
    whole: Any = {"x": 0, "y": 0, "width": WIDTH, "height": SAMPLES_HEIGHT}
    for colour, suffix in COLOURS.items():
        page.get_by_role("button", name=colour).click()
        page.screenshot(path=file.with_stem(file.stem + suffix), clip=whole)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("out", type=Path, help="folder of the pictures")
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=PAGES)
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        report = Path(folder) / "report.html"
        if code := dashboard([args.run, "--report", str(report)], "dashboard"):
            sys.exit(code)
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="dark" if args.dark else "light"
        )
        page.goto(report.as_uri())
        page.wait_for_selector(".card")
        for name in args.pages:
            page.keyboard.press(str(PAGES.index(name) + 1))
            page.wait_for_function(
                "name => document.querySelector('[aria-selected=true]').textContent === name", arg=name
            )
            page.wait_for_timeout(500)  # curves and the timeline are drawn
            own = "" if name == "Overview" else f"_{name.lower()}"
            if name == "Samples":
                samples(page, args.out / f"dashboard{own}.png")
            else:
                page.screenshot(path=args.out / f"dashboard{own}.png")
        browser.close()


if __name__ == "__main__":
    main()
