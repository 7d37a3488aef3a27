"""A version on its way to a host that shares no folder: as whole files, and as what changed since the one before.

    python benchmarks/deltas.py [--parameters 100] [--links 0.1 1 10] [--rounds 3]

Real staging servers with TLS, each in a process of its own, with a relay between them that lets through so many Gb/s.
Two versions of random weights in bf16, rounded from fp32 masters of which every one moved by the learning rate, as
AdamW's steps are. Seconds are medians of rounds in which both take turns; the delta's include making it, which the
source does once for all hosts, and the receiver's part. CPU seconds are those of both servers, also medians: on a
machine with free cores a fetch takes about the larger of what the link needs for the bytes and what these need.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from common import Table, in_turns, parser

from asyncrl.comm.http_client import JsonHttp
from asyncrl.comm.security import HttpSecurity, RunSecret
from asyncrl.staging.client import StageRequest, StagingClient
from asyncrl.staging.process import StagingService
from asyncrl.weights.manifest import Manifest, TensorEntry, file_entry, write_manifest

LEARNING_RATES = (1e-4, 1e-5, 1e-6)
TENSORS = 20
PIECE_BYTES = 256 << 10


def publish(folder: Path, version: int, millions: int, lr: float) -> Path:
    """Write version 1 of the weights, or 2, of which every master weight is `lr` away."""
    import torch

    from asyncrl.weights.tensor_file import write_tensors  # servers and relays need no torch

    folder.mkdir(parents=True)
    count = millions * 1_000_000 // TENSORS
    tensors = {}
    for number in range(TENSORS):
        generator = torch.Generator().manual_seed(number)
        master = 0.02 * torch.randn(count, generator=generator)
        if version == 2:
            master += lr * torch.randn(count, generator=generator).sign()
        tensors[f"w{number}"] = master.bfloat16()
    write_tensors(folder / "model.safetensors", tensors)
    entries = {name: TensorEntry((count,), "BF16", "model.safetensors") for name in tensors}
    files = {"model.safetensors": file_entry(folder / "model.safetensors")}
    write_manifest(folder, Manifest("actor", version, files, entries))
    return folder


def serve(root: Path, secret: Path, deltas: bool, connection: Connection) -> None:
    """A staging server, until the other end is closed."""

    async def main() -> None:
        security = RunSecret.load(secret).http()
        service = StagingService(root, security, lambda name, path: None, deltas=deltas)
        connection.send(await service.http.start("127.0.0.1"))
        with suppress(EOFError):
            await asyncio.to_thread(connection.recv)
        await service.close()

    asyncio.run(main())


def relay(port: int, gigabits: float, connection: Connection) -> None:
    """A link to `port` that lets through `gigabits` a second in each direction."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, free_at: list[float]) -> None:
        while piece := await reader.read(PIECE_BYTES):
            free_at[0] = max(free_at[0], time.perf_counter()) + len(piece) * 8 / (gigabits * 1e9)
            if (wait_s := free_at[0] - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def main() -> None:
        there, back = [0.0], [0.0]

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(ConnectionError, asyncio.CancelledError):  # the end of the measurement cuts it off
                await asyncio.gather(pump(reader, far_writer, there), pump(far_reader, writer, back))

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        connection.send(server.sockets[0].getsockname()[1])
        with suppress(EOFError):
            await asyncio.to_thread(connection.recv)

    asyncio.run(main())


class Processes:
    """Processes that tell one thing when they are ready and end when this block does."""

    def __init__(self) -> None:
        self._context, self._ends = multiprocessing.get_context("spawn"), list[Connection]()
        self._servers: list[psutil.Process] = []

    def start(self, target: object, *args: object) -> object:
        """Start it; return what it tells."""
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(*args, theirs), daemon=True)  # type: ignore[arg-type]
        process.start()
        self._ends.append(mine)
        if target is serve:
            self._servers.append(psutil.Process(process.pid))
        return mine.recv()

    def cpu_s(self) -> float:
        """CPU seconds of the servers so far."""
        return sum(sum(server.cpu_times()[:2]) for server in self._servers)

    def close(self) -> None:
        """End all of them."""
        for end in self._ends:
            end.close()
        for process in multiprocessing.active_children():
            process.join(10)


async def fetched_s(
    http: JsonHttp, source: str, shaped: str, host: str, folders: list[Path], cpu_s: Callable[[], float]
) -> tuple[float, float]:
    """Seconds and CPU seconds in which version 2 comes to `host`, which has version 1."""
    sums = []
    for folder in folders:
        request = StageRequest(folder.name, path=str(folder), keep=("v1",))
        sums.append((await StagingClient(http, source).stage(request)).manifest_sum)
    await StagingClient(http, host).stage(StageRequest("v1", source=source, manifest_sum=sums[0]))
    began, cpu_began = time.perf_counter(), cpu_s()
    await StagingClient(http, host).stage(StageRequest("v2", source=shaped, manifest_sum=sums[1], keep=("v1",)))
    return time.perf_counter() - began, cpu_s() - cpu_began


def one_round(
    link: float, deltas: bool, folders: list[Path], place: Path, secret: Path, security: HttpSecurity
) -> tuple[float, float, float]:
    """Seconds, CPU seconds and the part of the bytes that were sent, by new servers."""
    processes = Processes()
    try:
        source = str(processes.start(serve, place / "source", secret, deltas))
        host = str(processes.start(serve, place / "host", secret, deltas))
        port = processes.start(relay, int(source.rpartition(":")[2]), link)
        shaped = f"{source.rpartition(':')[0]}:{port}"

        async def fetch() -> tuple[float, float]:
            http = JsonHttp(security)
            try:
                return await fetched_s(http, source, shaped, host, folders, processes.cpu_s)
            finally:
                await http.close()

        seconds, cpu_s = asyncio.run(fetch())
        whole = (folders[1] / "model.safetensors").stat().st_size
        sent = [delta.stat().st_size for delta in (place / "host").glob("deltas/*/*")]
        return seconds, cpu_s, sent[-1] / whole if sent else 1.0
    finally:
        processes.close()


def main() -> None:
    """Print a row for each link and learning rate."""
    command = parser(__doc__)
    command.add_argument("--parameters", type=int, default=100, help="millions")
    command.add_argument("--links", type=float, nargs="+", default=[0.1, 1.0, 10.0], help="Gb/s")
    command.add_argument("--rounds", type=int, default=3)
    args = command.parse_args()
    table = Table("Gb/s, learning rate", "bytes", "whole", "delta", "faster", "CPU whole", "CPU delta")
    for link in args.links:
        for lr in LEARNING_RATES:
            with tempfile.TemporaryDirectory() as scratch:
                root, secret = Path(scratch), Path(scratch) / "secret"
                RunSecret.create(secret)
                security = RunSecret.load(secret).http()
                folders = [publish(root / f"v{version}", version, args.parameters, lr) for version in (1, 2)]
                found: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
                for number, deltas in in_turns(found, args.rounds):
                    place = root / f"{number}-{deltas}"
                    found[deltas].append(one_round(link, deltas, folders, place, secret, security))
            (whole, cpu_whole, _), (delta, cpu_delta, share) = (
                map(statistics.median, zip(*each, strict=True)) for each in found.values()
            )
            times = (f"{whole:.2f} s", f"{delta:.2f} s", f"{whole / delta:.1f} x", f"{cpu_whole:.2f} s")
            table.row(f"{link:g}, {lr:g}", f"{share:.1%}", *times, f"{cpu_delta:.2f} s")


if __name__ == "__main__":
    main()
