"""Show where every training rank is placed and how much memory it needs, with a warning if that is not there."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import Config
from asyncrl.config.machine_limits import host_memory
from asyncrl.config.run_dir import read_run_config
from asyncrl.inference.settings import guests_of
from asyncrl.launch.previews.guest_memory import problems
from asyncrl.launch.previews.rank_memory import (
    GIB,
    RUNTIME_BYTES,
    RankRow,
    allocation,
    beside_servers,
    in_turns,
    memory_checkpoint_bytes,
    server_line,
)
from asyncrl.master.graph.builtin import load_graph
from asyncrl.runtime.exit_codes import EXIT_CONFIG, EXIT_OK
from asyncrl.runtime.planning.plan_workers import with_types
from asyncrl.runtime.process.hardware import gpu_details
from asyncrl.trainer.parallel.placement import engine_of, placement
from asyncrl.trainer.supervised.settings import SFTConfig

_WIDTH = 200
"""Width of the table; a narrower terminal gets a line for each figure."""


def show_allocation(config: Config, folder: Path | None) -> int:
    """Print the table and its warnings; return the exit code. `folder` has the user's experiments."""
    if isinstance(config, SFTConfig):
        print("error: a supervised experiment has one process and no layout", file=sys.stderr)
        return 1
    config, graph = with_types(config), load_graph(config)
    placed = placement(config, graph)
    rows = allocation(config, graph, placed, folder)
    console = Console(highlight=False, markup=False, width=_WIDTH)
    work = f"{config.model.dtype}, {config.trainer.tokens_per_micro_batch} tokens per micro-batch"
    ranks = f"{placed.workers} training rank{'s' * (placed.workers != 1)}"
    unit = "GiB" if max(row.need.total for row in rows) >= GIB else "MiB"
    whole = {name: gpu.memory for name, gpu in gpu_details().items() if gpu.memory is not None}
    gpu_bytes = beside_servers(config, whole)
    shared = in_turns(config, graph, rows, folder)
    heading = [
        f"{ranks}, actor {placed.actor}, engine {engine_of(config)}, {work}",
        f"memory in {unit}, in brackets with gradient checkpointing;",
        "not counted in the table: the libraries' own, and what is below it",
    ]
    console.print("\n".join(heading), soft_wrap=True)
    table = _table(rows, GIB if unit == "GiB" else GIB >> 10)
    fits = console.measure(table).maximum <= shutil.get_terminal_size((_WIDTH, 24)).columns
    console.print(table if fits else _stacked(table))
    if kept := memory_checkpoint_bytes(config, graph, placed, folder):
        console.print(f"in-memory checkpoint: {kept / GIB:.2f} GiB of /dev/shm on the ranks' hosts", soft_wrap=True)
    if config.generation.engine.memory_is_counted:
        console.print(server_line(config, graph, folder), soft_wrap=True)
    for line in warnings(rows, host_memory() - kept, gpu_bytes):
        console.print(f"warning: {line}", soft_wrap=True)
    for device in shared:
        console.print(str(device), soft_wrap=True)
    missing = problems(shared, whole)
    for line in missing:
        console.print(f"error: {line}", soft_wrap=True)
    return EXIT_CONFIG if missing else EXIT_OK


def guests_without_room(config: ExperimentConfig) -> list[str]:
    """Return an error message for each GPU of this host whose guests and ranks do not fit on it in turns."""
    whole = {name: gpu.memory for name, gpu in gpu_details().items() if gpu.memory is not None}
    if not whole or not guests_of(config.generation):
        return []
    graph = load_graph(config)
    rows = allocation(config, graph, placement(config, graph), None)
    return problems(in_turns(config, graph, rows, None), whole)


def warnings(rows: Sequence[RankRow], host_bytes: int, gpu_bytes: Mapping[str, int]) -> list[str]:
    """Return a warning for each rank that does not fit on its GPU, and for ranks that do not fit in the machine's
    memory.
    """
    lines = []
    on_cpu = [row for row in rows if row.gpu is None]
    fixed = RUNTIME_BYTES["cpu"] * len(on_cpu)
    host = sum(row.need.on_host for row in rows)
    needed = (sum(row.need.total for row in on_cpu) + host, sum(row.need.total_checkpointed for row in on_cpu) + host)
    if on_cpu:
        who = f"the {len(on_cpu)} ranks on the CPU together"
        lines += _too_much(who, "this machine has", *needed, fixed, host_bytes)
    elif host > host_bytes:
        lines.append(
            f"roles, moments and activations that are kept in host memory need {host / GIB:.1f} GiB of it, and this "
            f"machine has {host_bytes / GIB:.1f} GiB; use trainer.offload=false, optimizer.moments_on=device and "
            "trainer.activations_on=device"
        )
    for row in rows:
        if row.gpu is None:
            continue
        if row.gpu not in gpu_bytes:
            lines.append(f"rank {row.worker}: the memory of GPU {row.gpu} is unknown (nvidia-smi does not report it)")
            continue
        needed = (row.need.total, row.need.total_checkpointed)
        where = f"GPU {row.gpu} has, beside the servers on it,"
        lines += _too_much(f"rank {row.worker}", where, *needed, RUNTIME_BYTES["gpu"], gpu_bytes[row.gpu])
    return lines


def _too_much(who: str, where: str, needed: int, checkpointed: int, fixed: int, there: int) -> list[str]:
    if needed + fixed <= there:
        return []
    room, plain, best = (f"{size / GIB:.1f} GiB" for size in (there, needed + fixed, checkpointed + fixed))
    beside = f"({fixed / GIB:.1f} of them for libraries)"
    lower = "or lower trainer.tokens_per_micro_batch"
    if checkpointed + fixed <= there:
        return [
            f"{who} will need {plain} {beside}, and {where} {room}; it fits with gradient checkpointing ({best}), "
            f"{lower}"
        ]
    return [
        f"{who} will need {best} {beside} even with gradient checkpointing, and {where} {room}; shard over more ranks "
        f"(d), cut into more slices or stages (t, p), {lower}"
    ]


def _table(rows: Sequence[RankRow], unit: int) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("rank", "host", "device", "roles and coordinates"):
        table.add_column(heading)
    on_host = any(row.need.on_host for row in rows)
    figures = ("weights", "gradients", "moments", "gathered", "activations", "logits", "peak")
    for heading in (*figures, "host") if on_host else figures:
        table.add_column(heading, justify="right")
    for row in rows:
        of = row.need
        kept = [f"{value / unit:.2f}" for value in (of.weights, of.gradients, of.moments, of.gathered)]
        activations = f"{of.activations / unit:.2f} ({(of.checkpointed + of.recomputed) / unit:.2f})"
        whole = f"{of.total / unit:.2f} ({of.total_checkpointed / unit:.2f})"
        cells = [*kept, activations, f"{of.logits / unit:.2f}", whole]
        cells += [f"{of.on_host / unit:.2f}"] * on_host
        table.add_row(str(row.worker), row.host, row.device, "\n".join(row.shards), *cells)
    return table


def _stacked(table: Table) -> str:
    """Return the table with a line for each figure, for a narrow terminal."""
    rows = zip(*(column.cells for column in table.columns), strict=True)
    return "\n".join(
        "\n".join(
            f"  {column.header!s:<21}  {str(cell).replace(chr(10), ', ')}"
            for column, cell in zip(table.columns, row, strict=True)
        )
        + "\n"
        for row in rows
    )


if __name__ == "__main__":
    print("\n".join(guests_without_room(read_run_config(Path(sys.argv[1])))))
