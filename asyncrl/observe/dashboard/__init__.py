"""A page that shows runs, from their files alone: live, or as one file to attach to an issue.

The page is one HTML document with its style and scripts; nothing is loaded from elsewhere. Its data for a run is one
JSON value whose size does not grow with the run. The page does not trust the content of a run's files: all of it is
shown as text and never parsed as HTML.

The server has the page, its data, and figures for Prometheus. It reads files and sends no request to the run's
processes.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from asyncrl.api.picture import Picture
from asyncrl.comm.http_server import HttpRoute, HttpServer, Refused, json_response
from asyncrl.config.run_dir import LOGS_DIR, SAMPLES_DIR
from asyncrl.config.secrets import without_secrets
from asyncrl.observe.doctor import examine
from asyncrl.observe.doctor.measured import policy_of_server
from asyncrl.observe.history import History, State
from asyncrl.observe.metrics.glossary import find
from asyncrl.observe.metrics.prometheus import CONTENT_TYPE, prometheus_text
from asyncrl.observe.samples import Row, pictures_of, read_samples, sample_files
from asyncrl.observe.status import Launch, StepSizes, outlook
from asyncrl.observe.timeline import Timeline, timeline

ROWS_EXPLAINED = 100
"""Number of newest rows that are searched for metrics to explain."""
MOST_POINTS = 600
"""Points of a curve, and columns of the heat map."""
TIMELINE_STEPS = 40
TIMELINE_SPANS = 2500
SAMPLE_FILES, SAMPLES_OF_FILE, SAMPLES_OF_ROLLOUT = 6, 12, 3
PICTURES_OF_SAMPLE, PICTURE_BYTES = 4, 128 << 10
SAMPLE_TOKENS = 2000
LOG_BYTES = 6000
PROCESS_POINTS = 120
Decode = Callable[[Sequence[int]], str]


def page_data(history: History, decode: Decode | None = None) -> dict[str, Any]:
    """Return all data of the run that the page shows. `decode` turns token ids into text, for single tokens."""
    settings = history.ledger.settings
    running = history.state is State.running
    data = {
        "name": history.name,
        "folder": str(history.folder),
        "state": str(history.state),
        "step": max(history.steps, default=0),
        "total": history.setting("total_train_steps", 0),
        "outlook": outlook(Launch(history.processes), _sizes(history)) if running else "",
        "eta": settings.max_head_offpolicyness if settings else 0,
        "config": _flat(without_secrets(history.config)),
        "series": _series(history),
        "meanings": _meanings(history),
        "ages": _ages(history),
        "dropped": _dropped(history),
        "doctor": examine(history).as_json(),
        "timeline": _timeline(history),
        "samples": _samples(history.folder / SAMPLES_DIR, decode),
        "counts": _counts(history),
        "processes": _processes(history),
        "restarts": history.restarts[-50:],
        "notices": history.notices[-30:],
        "logs": _logs(history.folder / LOGS_DIR),
    }
    return dict(_clean(data))


def _clean(value: Any) -> Any:
    """Convert `value` for JSON: infinite numbers and NaN become null, others have six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _clean(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(each) for each in value]
    return value


def _sizes(history: History) -> StepSizes:
    config = history.config
    return StepSizes(
        *(int(config.get(name) or least) for name, least in zip(StepSizes._fields, (0, 0, 1), strict=True))
    )


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, str | int | float | bool | None) else str(value)
    return flat


def _thinned(numbers: Sequence[int], most: int = MOST_POINTS) -> list[int]:
    """Return every n-th of `numbers`, and the last."""
    every = -(-len(numbers) // most) if numbers else 1
    return list(numbers[::-1][::every][::-1])


def _series(history: History) -> dict[str, list[float | None]]:
    """Return the values of each metric at the steps in `step`. Metrics that only some rows have keep all values."""
    chosen = set(_thinned(sorted(history.rows)))
    rare = {step for step, row in history.rows.items() if any(name.startswith("eval/") for name in row)}
    steps = sorted(chosen | set(_thinned(sorted(rare))))
    rows = [history.rows[step] for step in steps]
    names = sorted({name for row in rows for name, value in row.items() if _is_number(value)} - {"step"})
    found: dict[str, list[float | None]] = {"step": [float(step) for step in steps]}
    for name in names:
        found[name] = [value if _is_number(value := row.get(name)) else None for row in rows]
    return found


def _meanings(history: History) -> dict[str, str]:
    """Return the glossary's text of each metric of the newest rows, for tooltips."""
    newest = [history.rows[step] for step in sorted(history.rows)[-ROWS_EXPLAINED:]]
    found = {name: find(name) for name in sorted({name for row in newest for name in row})}
    return {name: f"{name}: {entry.meaning} Healthy: {entry.healthy}" for name, entry in found.items() if entry}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ages(history: History) -> dict[str, Any]:
    """Return the shares of trained tokens by age, for each shown step."""
    steps = _thinned(sorted(history.steps))
    ages = [history.steps[step].ages for step in steps]
    most = max((max(each, default=0) for each in ages), default=0)
    shares = [[each[age] / max(1, each.total()) for age in range(most + 1)] for each in ages]
    return {"steps": steps, "shares": shares}


def _dropped(history: History) -> dict[str, Any]:
    """Return dropped rollouts by reason, summed over the steps between two shown ones."""
    steps = _thinned(sorted(history.steps))
    sums: list[Counter[str]] = []
    waiting: Counter[str] = Counter()
    shown = set(steps)
    for number in sorted(history.steps):
        waiting += history.steps[number].dropped
        if number in shown:
            sums.append(waiting)
            waiting = Counter()
    reasons = sorted({reason for each in sums for reason in each})
    return {"steps": steps, "reasons": {reason: [each[reason] for each in sums] for reason in reasons}}


def _timeline(history: History) -> dict[str, Any] | None:
    """Return spans of the newest steps as lists: track, lane, kind, name, begin, end, description."""
    steps = sorted(step for step in history.steps if step in history.rows)[-TIMELINE_STEPS:]
    line: Timeline | None = None
    while steps:
        line = timeline(history, steps[0], steps[-1])
        shown = [span for span in line.spans if span.kind != "wait"]
        if len(shown) <= TIMELINE_SPANS or len(steps) == 1:
            break
        steps = steps[len(steps) // 2 :]
    if line is None:
        return None
    tracks = list(dict.fromkeys(span.track for span in shown))
    spans = [
        [
            tracks.index(span.track),
            span.lane,
            span.kind,
            span.name,
            round(span.begin - line.begin, 4),
            round(span.end - line.begin, 4),
            ", ".join(f"{key} {value}" for key, value in span.about.items() if value is not None and key != "rollout"),
        ]
        for span in shown[:TIMELINE_SPANS]
    ]
    return {"length": line.end - line.begin, "tracks": tracks, "spans": spans}


def _samples(folder: Path, decode: Decode | None) -> dict[str, Any]:
    """Return kept samples of some steps, from the first to the newest; without samples, `why` has the reason."""
    files = sample_files(folder) if folder.is_dir() else []
    if not files:
        return {"rows": [], "why": "no samples were kept; samples.every=16 keeps every 16th trained rollout"}
    chosen = [files[round(index * (len(files) - 1) / max(1, SAMPLE_FILES - 1))] for index in range(SAMPLE_FILES)]
    try:
        rows = []
        for file in dict.fromkeys(chosen):
            read = list(islice(_few_of_each(read_samples([file])), SAMPLES_OF_FILE))
            pictures = pictures_of(read)
            rows += [_sample(row, decode) | _pictures(row, pictures) for row in read]
    except ImportError:
        return {"rows": [], "why": "samples are Parquet files, which need pyarrow: pip install 'asyncrl[data]'"}
    except (OSError, ValueError) as error:
        return {"rows": [], "why": f"the kept samples cannot be read: {error}"}
    return {"rows": rows, "why": ""}


def _few_of_each(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the first samples of each rollout."""
    seen: Counter[str] = Counter()
    for row in rows:
        seen[row["rollout"]] += 1
        if seen[row["rollout"]] <= SAMPLES_OF_ROLLOUT:
            yield row


def _pictures(row: Row, pictures: Mapping[str, Picture]) -> dict[str, Any]:
    """Return the row's first pictures as data URLs if they are small. The text names the others."""
    hashes = list(dict.fromkeys(each["sha256"] for each in row.get("pictures") or ()))[:PICTURES_OF_SAMPLE]
    found = [pictures[sha256] for sha256 in hashes if sha256 in pictures]
    urls = [picture.data_url for picture in found if len(picture.data) <= PICTURE_BYTES]
    return {"pictures": urls} if urls else {}


def _sample(row: Row, decode: Decode | None) -> dict[str, Any]:
    """Return a sample for the page: pieces of text, each with its version (-1: not generated) and token scores."""
    shown = {name: row[name] for name in ("step", "prompt", "rollout", "sample", "staleness", "truncated")}
    shown |= {"reward": row["total_reward"], "parts": dict(row["reward_parts"] or {}), "length": len(row["tokens"])}
    shown["group"] = row.get("group") or ""
    if decode is None or len(row["tokens"]) > SAMPLE_TOKENS:
        pieces = [[each["text"], each["version"] if each["generated"] else -1] for each in row["segments"]]
        return {**shown, "pieces": pieces, "by_token": False}
    scores = [row["behave_logprobs"], row["prox_logprobs"], row["advantages"]]
    pieces = []
    spans = {each["position"]: each for each in row.get("pictures") or ()}
    names = {each["start"]: each["text"] for each in row["segments"]}
    end = 0
    for index, token in enumerate(row["tokens"]):
        if index in spans:
            end = index + spans[index]["length"]
            pieces.append([names[index], -1])
        if index < end:
            continue
        version = row["versions"][index] if row["loss_mask"][index] else -1
        pieces.append([decode([token]), version, *(each[index] if each else None for each in scores)])
    return {**shown, "pieces": pieces, "by_token": True}


def _counts(history: History) -> dict[str, Any]:
    counts = history.ledger.ended.counts if history.ledger.ended is not None else None
    for step in sorted(history.steps, reverse=True):
        counts = counts or history.steps[step].counts
        if counts is not None:
            break
    return {} if counts is None else msgspec.structs.asdict(counts)


def _processes(history: History) -> list[dict[str, Any]]:
    """Return each process with its activity, and its memory and processor share over its newest lines."""
    found, policies = [], policy_of_server(history)
    for name, process in sorted(history.processes.items()):
        lines = [line for line in process.lines if "rss" in line]
        if not lines:
            continue
        lines = [lines[index] for index in _thinned(range(len(lines)), PROCESS_POINTS)]
        last = process.last
        newest = next((line for line in reversed(process.lines) if "running" in line), last)
        span_s = max(60.0, lines[-1]["at"] - lines[0]["at"])
        found.append(
            {
                "name": name,
                "policy": policies.get(name, ""),
                "stage": last.get("stage", ""),
                "since_s": history.now - last.get("since", history.now),
                "silent_s": history.now - last["at"],
                "ended": bool(last.get("ended")),
                "rss": last["rss"],
                "cpu": process.rate("cpu_s", lines[-1]["at"] - span_s, lines[-1]["at"]),
                "late_s": max(line.get("late_s", 0.0) for line in lines),
                "loop_late_s": max((line["loop_late_s"] for line in lines if "loop_late_s" in line), default=None),
                "at": [line["at"] - lines[0]["at"] for line in lines],
                "rss_at": [line["rss"] / 2**20 for line in lines],
                "figures": {
                    key: value
                    for key, value in newest.items()
                    if _is_number(value) and key not in ("at", "since", "pid", "rss", "late_s", "loop_late_s")
                },
            }
        )
    return found


def _logs(folder: Path) -> dict[str, str]:
    """Return the end of each log."""
    ends = {}
    for file in sorted(folder.glob("*.log")) if folder.is_dir() else ():
        try:
            with file.open("rb") as stream:
                stream.seek(max(0, file.stat().st_size - LOG_BYTES))
                ends[file.stem] = stream.read().decode(errors="replace")
        except OSError:
            continue
    return ends


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


SEEN_BYTES = 64


class Dashboard:
    """Serves the page of `histories`.

    Args:
        decoders: for each run, the function from token ids to text; None if unknown.
        token: bearer token of all paths except the page itself, which contains no data.
        host: address to listen on.
    """

    def __init__(
        self, histories: Sequence[History], decoders: Sequence[Decode | None], *, token: str, host: str
    ) -> None:
        self._runs = list(zip(histories, decoders, strict=True))
        self._host = host
        self._reading = asyncio.Lock()
        self._page = html(None).encode()
        self._server = HttpServer(
            {
                "/": HttpRoute(self._answer_page, "GET", open=True),
                "/api/runs": HttpRoute(self._answer_runs, "GET"),
                "/metrics": HttpRoute(self._answer_metrics, "GET"),
            },
            token=token,
            tls=None,
        )

    async def start(self, port: int) -> str:
        """Listen; returns the URL. Port 0 takes a free one."""
        return await self._server.start(self._host, port)

    async def close(self) -> None:
        """Stop listening."""
        await self._server.close()

    async def _answer_page(self, request: web.BaseRequest, body: bytes) -> web.Response:
        headers = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
        return web.Response(body=self._page, content_type="text/html", charset="utf-8", headers=headers)

    async def _answer_runs(self, request: web.BaseRequest, body: bytes) -> web.Response:
        """Return all runs if anything has changed since the caller's version."""
        seen = request.query.get("seen", "")
        if len(seen) > SEEN_BYTES:
            raise Refused(400, {"error": "seen is no version"}, "malformed")
        async with self._reading:
            runs = await asyncio.to_thread(self._read)
        version = hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()[:SEEN_BYTES]
        return json_response({"version": version, "runs": None if version == seen else runs})

    async def _answer_metrics(self, request: web.BaseRequest, body: bytes) -> web.Response:
        async with self._reading:
            text = await asyncio.to_thread(self._read_metrics)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    def _read_metrics(self) -> str:
        for history, _ in self._runs:
            history.refresh()
        return prometheus_text(history for history, _ in self._runs)

    def _read(self) -> list[dict[str, Any]]:
        found = []
        for history, decode in self._runs:
            history.refresh()
            found.append(page_data(history, decode))
        return found


Ready = Callable[[str], None]
"""Takes the URL once the dashboard listens."""


async def serve(dashboard: Dashboard, port: int, ready: Ready, stop: asyncio.Event) -> None:
    """Serve until `stop` is set."""
    url = await dashboard.start(port)
    try:
        ready(url)
        await stop.wait()
    finally:
        await dashboard.close()
