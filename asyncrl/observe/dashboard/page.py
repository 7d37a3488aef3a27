"""The page as one HTML document with its style and scripts; nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

SCRIPTS = ("uPlot.iife.min.js", "parts.js", "charts.js", "timeline.js", "pages.js", "main.js")
STYLES = ("uPlot.min.css", "style.css")
UPLOT_SHA256 = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""uPlot 1.6.32 (MIT licence, `uPlot.LICENSE`), unchanged."""


def static(name: str) -> str:
    """Return the text of one of the page's parts."""
    return files("asyncrl.observe.dashboard").joinpath("static", name).read_text(encoding="utf-8")


def html(runs: Sequence[dict[str, Any]] | None) -> str:
    """Return the page. With `runs` (see `page_data`) the page is a report that contains its data; without, the page
    requests the data from its server.
    """
    data = "null" if runs is None else json.dumps(list(runs), separators=(",", ":"), allow_nan=False)
    scripts = [f"const DATA = {_inside_script(data)};", *map(static, SCRIPTS)]
    policy = content_policy(scripts)
    head = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "<title>asyncrl</title>",
        *(f"<style>{static(name)}</style>" for name in STYLES),
    ]
    body = [static("body.html"), *(f"<script>{script}</script>" for script in scripts)]
    return "".join([*head, "</head><body>", *body, "</body></html>"])


def content_policy(scripts: Sequence[str]) -> str:
    """Return the content security policy: the page runs only these scripts and connects only to its own server."""
    sums = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in scripts)
    return (
        f"default-src 'none'; script-src {sums}; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _inside_script(text: str) -> str:
    """Escape JSON so that no string in it can end the script or begin a comment."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
