"""Place and memory need of every training rank of a checked experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.comm.names import GENERATION_SERVER, MODEL_WORKER
from asyncrl.config.context import context_length
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.config.trained_policies import config_of_policy, policy_and_role
from asyncrl.inference.settings import guests_of
from asyncrl.launch.before_start.models import base_model_config
from asyncrl.launch.previews.guest_memory import SharedDevice, cache_bytes, shared_devices
from asyncrl.master.graph.call_graph import Graph
from asyncrl.models.model_config import read_model_config
from asyncrl.runtime.planning.plan_workers import plan_workers
from asyncrl.runtime.trials.memory_checkpoint import uses_memory_checkpoint
from asyncrl.trainer.parallel.placement import engine_of, model_of
from asyncrl.trainer.parallel.worker_grid import Placement
from asyncrl.trainer.settings import ALL_LINEAR, KeptOn, OptimizerConfig, ReferenceMode
from asyncrl.trainer.sizing.attention_shape import packed_shape
from asyncrl.trainer.sizing.memory_estimate import MemoryNeed, Workload, need, total, trained_values
from asyncrl.trainer.sizing.sized_model import SizedModel, count
from asyncrl.trainer.supervised.base_model import described

GIB = 1 << 30
RUNTIME_BYTES = {"cpu": GIB // 2, "gpu": 3 * GIB // 2}
"""Memory besides models: a process's libraries; on a GPU its CUDA context, NCCL's buffers and fragmentation."""


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
                place,
                _workload(config, role),
                trained=policy_and_role(config, role)[1] in ("actor", "critic"),
            )
            for role, place in shards.items()
        ]
        gpu = plan.resources.gpus[0] if plan.resources.gpus else None
        rows.append(
            RankRow(
                plan.index,
                plan.host.name or plan.host.address or config.system.host,
                gpu,
                tuple(f"{role}@{place}" for role, place in shards.items()),
                total(needs, offload=config.trainer.offload),
            )
        )
    return rows


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


def in_turns(
    config: ExperimentConfig, graph: Graph, rows: Sequence[RankRow], folder: Path | None
) -> list[SharedDevice]:
    """Return the GPUs of this host that training ranks and their guests use in turns."""
    if not guests_of(config.generation):
        return []
    model = count(_described(config, model_of(config, graph, "actor"), folder))
    here = [(row.gpu, row.need) for row in rows if row.host == config.system.host]
    return shared_devices(config, model, here, RUNTIME_BYTES["gpu"])


def beside_servers(config: ExperimentConfig, gpu_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return the memory of this host's GPUs that servers leave which take a share of the free memory.

    Guests leave all of it while a step is trained.
    """
    share = config.generation.engine.memory_share or 0.0
    left, guests = dict(gpu_bytes), guests_of(config.generation)
    for plan in plan_workers(config):
        if plan.kind == GENERATION_SERVER and plan.index not in guests and not plan.host.name:
            left |= {gpu: round(left[gpu] * (1 - share)) for gpu in plan.resources.gpus if gpu in left}
    return left


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
    longest, prompt = context_length(config, {}), config.dataset.max_prompt_tokens
    on_gpus = any(plan.resources.gpus for plan in plan_workers(config) if plan.kind == MODEL_WORKER)
    return Workload(
        engine,
        dtype,
        config.model.attn_implementation,
        config.trainer.tokens_per_micro_batch,
        longest,
        moments_on_host=_optimizer(config, role).moments_on == KeptOn.host,
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


def _optimizer(config: ExperimentConfig, role: str) -> OptimizerConfig:
    return config.algorithm.critic.optimizer if role == "critic" else config.optimizer
