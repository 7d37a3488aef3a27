"""`python -m asyncrl.launch dashboard RUN...`: show runs on a page, live, or as one file with `--report`.

Exit codes: 0 done, 2 a folder is not a run, or the address is not a loopback address of this host.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import os
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path

from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.launch.commands import refuse
from asyncrl.observe.dashboard import Dashboard, Decode, html, page_data, serve
from asyncrl.observe.history import History
from asyncrl.runtime.settings import EXIT_OK

PORT = 8265
LEAST_TOKEN = 16
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"{program} dashboard", description="Show runs on a page: what they learn, why they wait, what they write."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run; several are overlaid")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write the page with its data, and stop")
    parser.add_argument("--host", default="127.0.0.1", help="loopback address to listen on; default 127.0.0.1")
    parser.add_argument("--port", type=int, default=PORT, help=f"default {PORT}; 0 takes a free one")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the token, for Prometheus; created if missing"
    )
    args = parser.parse_args(argv)
    try:
        _check_host(args.host)
        token = token_of(args.token_file)
        histories = [History(run) for run in args.runs]
    except ValueError as error:
        return refuse(error)
    decoders = [_decoder(history) for history in histories]
    if args.report is not None:
        pages = zip(histories, decoders, strict=True)
        args.report.write_text(html([page_data(history, decode) for history, decode in pages]), encoding="utf-8")
        print(f"{args.report}: {args.report.stat().st_size / 1e3:.0f} kB; open it in a browser, or attach it")
        return EXIT_OK
    return asyncio.run(_serve(histories, decoders, args.host, args.port, token))


async def _serve(
    histories: Sequence[History], decoders: Sequence[Decode | None], host: str, port: int, token: str
) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def ready(url: str) -> None:
        print(f"{url}/#token={token}\nCtrl-C ends the dashboard; the runs continue", flush=True)

    try:
        await serve(Dashboard(histories, decoders, token=token, host=host), port, ready, stop)
    except OSError as error:
        return refuse(f"--port {port}: {error.strerror}; choose another, or 0 for a free one")
    return EXIT_OK


def token_of(file: Path | None) -> str:
    """Return the token in `file`, which is made with a new token if it does not exist; without a file a new token.

    Raises:
        ValueError: the file cannot be read or made, or has no token.
    """
    made = secrets.token_urlsafe(24)
    if file is None:
        return made
    try:
        with contextlib.suppress(FileExistsError), os.fdopen(os.open(file, _MAKE, 0o600), "w") as stream:
            stream.write(made)
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--token-file {file}: {error}; name a file that you can read, or a new one") from error
    if len(token) < LEAST_TOKEN:
        raise ValueError(f"--token-file {file}: holds no token of {LEAST_TOKEN} characters; remove it for a new one")
    return token


def _check_host(host: str) -> None:
    """Check that only this host can reach the page, as it is served without TLS.

    Raises:
        ValueError: other hosts could reach it.
    """
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ValueError(
            f"--host {host}: the page is served without encryption, to this host alone; from elsewhere use "
            f"ssh -L {PORT}:127.0.0.1:{PORT}, or send the file that --report writes"
        )


def _decoder(history: History) -> Decode | None:
    """Return the decoder of the run's token ids; None if the model's tokenizer no longer exists."""
    path = history.setting("model.path")
    if not path or not (Path(path) / "config.json").is_file():
        return None
    try:
        return load_tokenizer(path).decode
    except (OSError, ValueError) as error:
        print(f"note: samples are shown without their tokens' figures, as {path} has no tokenizer: {error}")
        return None
