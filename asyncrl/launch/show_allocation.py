"""Show where every training rank is placed and how much memory it needs, with a warning if that is not there.

Devices that training ranks and generation servers use in turns need the larger of both counts, not the sum:

    while a step is trained    what the ranks need at their peak
    while servers generate     what the servers need, beside what the ranks keep: nothing if roles are off-loaded, else
                               weights, gradients and moments

The libraries of both processes (CUDA contexts and fragmentation) take memory all the time.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from asyncrl.comm.names import GENERATION_SERVER, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import Config
from asyncrl.config.machine import host_memory
from asyncrl.config.memory import context_length
from asyncrl.config.run_dir import read_run_config
from asyncrl.config.setting import Dtype
from asyncrl.config.variants import config_of_policy, policy_and_role
from asyncrl.inference.settings import colocated_servers
from asyncrl.launch.before_start.models import base_model_config
from asyncrl.master.graph import Graph, load_graph
from asyncrl.models.model_config import ModelFacts, read_model_config
from asyncrl.runtime.plan import plan_workers, with_types
from asyncrl.runtime.process.hardware import gpu_details
from asyncrl.runtime.settings import EXIT_CONFIG, EXIT_OK
from asyncrl.runtime.trials.memory_checkpoint import uses_memory_checkpoint
from asyncrl.trainer.parallel.placement import Placement, engine_of, model_of, placement
from asyncrl.trainer.settings import ALL_LINEAR, KeptOn, ReferenceMode
from asyncrl.trainer.sizing import MemoryNeed, SizedModel, Workload, count, need, packed_shape, total, trained_values
from asyncrl.trainer.supervised.base_model import described
from asyncrl.trainer.supervised.settings import SFTConfig

GIB = 1 << 30
RUNTIME_BYTES = {"cpu": GIB // 2, "gpu": 3 * GIB // 2}
"""Memory besides models: a process's libraries; on a GPU its CUDA context, NCCL's buffers and fragmentation."""
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


def colocation_errors(config: ExperimentConfig) -> list[str]:
    """Return an error message for each GPU of this host whose colocated servers and ranks do not fit on it in turns."""
    whole = {name: gpu.memory for name, gpu in gpu_details().items() if gpu.memory is not None}
    if not whole or not colocated_servers(config.generation):
        return []
    graph = load_graph(config)
    rows = allocation(config, graph, placement(config, graph), None)
    return problems(in_turns(config, graph, rows, None), whole)


@dataclass(frozen=True, slots=True)
class RankRow:
    """One training rank: its place, its roles, its memory."""

    worker: int
    host: str
    gpu: str | None
    shards: tuple[str, ...]
    need: MemoryNeed

    @property
    def device(self) -> str:
        """Return the device in words."""
        return "cpu" if self.gpu is None else f"gpu {self.gpu}"


def allocation(config: ExperimentConfig, graph: Graph, placed: Placement, folder: Path | None) -> list[RankRow]:
    """Return every training rank of the run."""
    models = _models(config, graph, placed, folder)
    plans = [plan for plan in plan_workers(config) if plan.kind == MODEL_WORKER]
    rows = []
    for plan in plans:
        shards = placed.shards_of(plan.index)
        needs = [
            need(
                models[role],
                placed.grids[role].layout,
                position,
                _workload(config, role),
                trained=policy_and_role(config, role)[1] in ("actor", "critic"),
            )
            for role, position in shards.items()
        ]
        gpu = plan.resources.gpus[0] if plan.resources.gpus else None
        rows.append(
            RankRow(
                plan.index,
                plan.host.name or plan.host.address or config.system.host,
                gpu,
                tuple(f"{role}@{position}" for role, position in shards.items()),
                total(needs, offload=config.trainer.offload),
            )
        )
    return rows


def _models(config: ExperimentConfig, graph: Graph, placed: Placement, folder: Path | None) -> dict[str, SizedModel]:
    """Return the model of each role, with its sizes."""
    counted: dict[tuple[str | None, bool], SizedModel] = {}
    models = {}
    for role in placed.roles:
        own = policy_and_role(config, role)[1]
        with_words = own in ("actor", "ref") or config.algorithm.teacher_of(own) is not None
        key = (model_of(config, graph, role), not with_words)
        if key not in counted:
            counted[key] = count(_described(config, key[0], folder), value_model=key[1])
        models[role] = counted[key]
    return models


def _described(config: ExperimentConfig, path: str | None, folder: Path | None) -> dict[str, Any]:
    """Return the `config.json` of the model in `path`; None: that of the base model, made or not."""
    if path is None:
        return described(base_model_config(config, folder))
    return read_model_config(path)


def _workload(config: ExperimentConfig, role: str) -> Workload:
    policy, role = policy_and_role(config, role)
    engine, config = engine_of(config), config_of_policy(config, policy)
    averaged = role == "ref" and config.algorithm.reference.mode == ReferenceMode.ema
    dtype = Dtype.float32 if averaged else config.model.dtype
    optimizer = config.algorithm.critic.optimizer if role == "critic" else config.optimizer
    longest, prompt = context_length(config, {}), config.dataset.max_prompt_tokens
    on_gpus = any(plan.resources.gpus for plan in plan_workers(config) if plan.kind == MODEL_WORKER)
    return Workload(
        engine,
        dtype,
        config.model.attn_implementation,
        config.trainer.tokens_per_micro_batch,
        longest,
        moments_on_host=optimizer.moments_on == KeptOn.host,
        activations_on_host=config.trainer.activations_on == KeptOn.host,
        shape=packed_shape(
            prompt,
            max(1, longest - prompt),
            config.group_size,
            config.trainer.tokens_per_micro_batch,
            share=config.trainer.share_prefixes,
        ),
        varlen=on_gpus and dtype == Dtype.bfloat16,
        float32_head=config.model.float32_head,
        adapter_rank=config.model.lora.rank if role == "actor" else 0,
        adapted=frozenset(config.model.lora.targets) - {ALL_LINEAR},
    )


def memory_checkpoint_bytes(config: ExperimentConfig, graph: Graph, placed: Placement, folder: Path | None) -> int:
    """Return the bytes of all ranks' in-memory checkpoints: two states, of which one is being written."""
    if not uses_memory_checkpoint(config):
        return 0
    state = 0
    for role, model in _models(config, graph, placed, folder).items():
        own, work = policy_and_role(config, role)[1], _workload(config, role)
        if own in ("actor", "critic"):
            state += (4 + 8) * trained_values(model, work)  # float32 weights, moments
        elif own == "ref" and config.algorithm.reference.mode == ReferenceMode.ema:
            state += 4 * model.numel
    return 2 * state


def server_line(config: ExperimentConfig, graph: Graph, folder: Path | None) -> str:
    """Return a line on the memory of each generation server whose engine has `memory_is_counted`."""
    generation = config.generation
    model = count(_described(config, model_of(config, graph, "actor"), folder))
    on_gpu = any(plan.resources.gpus for plan in plan_workers(config) if plan.kind == GENERATION_SERVER)
    exact = generation.dtype.on("cuda" if on_gpu else "cpu") == Dtype.float32
    weights = model.numel * (4 if exact else 2)
    head = 4 * model.sizes.vocabulary * model.sizes.hidden if config.model.float32_head and not exact else 0
    packed = weights if exact and not on_gpu else head  # matrices packed for the CPU's kernels, or a head in float32
    cache = cache_bytes(config, model, 4 if exact else 2)
    parts = f"weights {weights / GIB:.2f}, packed copies {packed / GIB:.2f}, KV cache up to {cache / GIB:.2f}"
    return f"each generation server, in GiB: {parts} (generation.max_total_tokens={generation.cache_tokens})"


def beside_servers(config: ExperimentConfig, gpu_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return the memory of this host's GPUs that servers leave which take a share of the free memory.

    Colocated servers leave all of it while a step is trained.
    """
    share = config.generation.engine.memory_share or 0.0
    left, colocated = dict(gpu_bytes), colocated_servers(config.generation)
    for plan in plan_workers(config):
        if plan.kind == GENERATION_SERVER and plan.index not in colocated and not plan.host.name:
            left |= {gpu: round(left[gpu] * (1 - share)) for gpu in plan.resources.gpus if gpu in left}
    return left


def in_turns(
    config: ExperimentConfig, graph: Graph, rows: Sequence[RankRow], folder: Path | None
) -> list[SharedDevice]:
    """Return the GPUs of this host that training ranks and their colocated servers use in turns."""
    if not colocated_servers(config.generation):
        return []
    model = count(_described(config, model_of(config, graph, "actor"), folder))
    here = [(row.gpu, row.need) for row in rows if row.host == config.system.host]
    return shared_devices(config, model, here, RUNTIME_BYTES["gpu"])


@dataclass(frozen=True, slots=True)
class SharedDevice:
    """A GPU of this host with a training rank and its colocated servers, in bytes.

    Attributes:
        training: the ranks' peak; `kept`: what they keep while colocated servers generate.
        serving: what the colocated servers need.
        libraries: of all processes there.
    """

    gpu: str
    training: int
    kept: int
    serving: int
    libraries: int

    def __str__(self) -> str:
        training, serving = self.training + self.libraries, self.kept + self.serving + self.libraries
        return (
            f"GPU {self.gpu}, in turns with colocated servers: {training / GIB:.1f} GiB while a step is trained, "
            f"{serving / GIB:.1f} while they generate, {self.libraries / GIB:.1f} of each for libraries; the peak is "
            f"{self.peak / GIB:.1f}"
        )

    @property
    def peak(self) -> int:
        """The most bytes that are needed at a time."""
        return max(self.training, self.kept + self.serving) + self.libraries

    def missing(self, there: int) -> str:
        """Return an error message if the device has less than is needed; empty if it is enough."""
        lacks = self.peak - there
        if lacks <= 0:
            return ""
        parts = f"{self.serving / GIB:.1f} for servers, {self.kept / GIB:.1f} that training keeps"
        what, advice = f"while servers generate ({parts})", "trainer.offload=true, fewer generation.max_total_tokens"
        if self.training >= self.kept + self.serving:
            what, advice = "while a step is trained", "gradient checkpointing, fewer trainer.tokens_per_micro_batch"
        return (
            f"generation.colocated: GPU {self.gpu} needs {self.peak / GIB:.1f} GiB {what}, with "
            f"{self.libraries / GIB:.1f} for libraries, and has {there / GIB:.1f}: {lacks / GIB:.1f} GiB are missing; "
            f"use {advice}, or a smaller model"
        )


def shared_devices(
    config: ExperimentConfig, model: SizedModel, ranks: Sequence[tuple[str | None, MemoryNeed]], libraries: int
) -> list[SharedDevice]:
    """Return the GPUs of this host that ranks and colocated servers share.

    Args:
        model: the actor's.
        ranks: the GPU of each training rank, and what it needs.
        libraries: bytes of the libraries of one process.
    """
    colocated = colocated_servers(config.generation)
    plans = [plan for plan in plan_workers(config) if plan.kind == GENERATION_SERVER and plan.index in colocated]
    found = []
    for gpu in dict.fromkeys(gpu for gpu, _ in ranks if gpu is not None):
        here = [need for at, need in ranks if at == gpu]
        servers = sum(gpu in plan.resources.gpus for plan in plans if not plan.host.name)
        if servers:
            kept = 0 if config.trainer.offload else sum(need.kept for need in here)
            both = libraries * (len(here) + servers)
            peak = sum(need.total for need in here)
            found.append(SharedDevice(gpu, peak, kept, servers * server_bytes(config, model), both))
    return found


def server_bytes(config: ExperimentConfig, model: SizedModel) -> int:
    """Return the bytes that one server needs for weights and cache. An engine without a fixed cache takes all free
    memory; for it this is the least that it can work with.
    """
    generation = config.generation
    value_bytes = 4 if generation.dtype.on("cuda") == Dtype.float32 else 2
    per_token = cache_bytes_per_token(model.sizes, value_bytes)
    weights = model.numel * value_bytes // generation.engine.shape.tensor
    if generation.engine.memory_is_counted:
        return weights + cache_bytes(config, model, value_bytes)
    tokens = generation.cache_tokens if generation.engine.fixed_cache else context_length(config, {})
    return weights + per_token * tokens


def cache_bytes(config: ExperimentConfig, model: SizedModel, value_bytes: int) -> int:
    """Return the bytes of the full cache of an engine that has `memory_is_counted`."""
    per_token = cache_bytes_per_token(model.sizes, value_bytes)
    spare = per_token // model.sizes.layers  # slots are laid out anew in a buffer of one layer
    return (per_token + spare) * config.generation.cache_tokens


def cache_bytes_per_token(sizes: ModelFacts, value_bytes: int) -> int:
    """Return the bytes of keys and values of one token in all layers."""
    return 2 * sizes.layers * sizes.key_value_heads * sizes.head_size * value_bytes


def problems(devices: Sequence[SharedDevice], gpu_bytes: Mapping[str, int]) -> list[str]:
    """Return an error message for each device that has too little memory."""
    checked = [device.missing(gpu_bytes[device.gpu]) for device in devices if device.gpu in gpu_bytes]
    return [message for message in checked if message]


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
    limit, plain, best = (f"{size / GIB:.1f} GiB" for size in (there, needed + fixed, checkpointed + fixed))
    beside = f"({fixed / GIB:.1f} of them for libraries)"
    lower = "or lower trainer.tokens_per_micro_batch"
    if checkpointed + fixed <= there:
        return [
            f"{who} will need {plain} {beside}, and {where} {limit}; it fits with gradient checkpointing ({best}), "
            f"{lower}"
        ]
    return [
        f"{who} will need {best} {beside} even with gradient checkpointing, and {where} {limit}; shard over more ranks "
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
    print("\n".join(colocation_errors(read_run_config(Path(sys.argv[1])))))
