"""The table of training ranks: who hosts what where, what will not fit, and that docs/sizing.md is up to date."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from asyncrl.comm.names import GENERATION_SERVER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.setting import ConfigError, Device, Dtype
from asyncrl.launch.before_start import setting_checks as before_start
from asyncrl.launch.before_start.setting_checks import validate
from asyncrl.launch.show_allocation import (
    GIB,
    RUNTIME_BYTES,
    RankRow,
    _models,
    allocation,
    beside_servers,
    colocation_errors,
    memory_checkpoint_bytes,
    problems,
    shared_devices,
    show_allocation,
    warnings,
)
from asyncrl.master.graph import load_graph
from asyncrl.runtime.plan import plan_workers
from asyncrl.runtime.process import hardware
from asyncrl.runtime.settings import EXIT_CONFIG
from asyncrl.trainer.parallel.placement import placement
from asyncrl.trainer.settings import KeptOn, ReferenceMode, RoleRanks
from asyncrl.trainer.sizing import MemoryNeed

ROOT = Path(__file__).resolve().parents[3]


def rows_of(config: ExperimentConfig) -> list[RankRow]:
    graph = load_graph(config)
    return allocation(config, graph, placement(config, graph), None)


def test_every_rank_is_listed_with_its_roles_and_what_they_need(config: ExperimentConfig, llama_dir: Path) -> None:
    config.trainer.device = Device.cpu
    config.trainer.parallel = "d2t2"
    config.algorithm.graph = "ppo"
    config.algorithm.kl_coef = 0.1
    config.algorithm.reference.parallel = "t2"
    config.algorithm.critic.path = str(llama_dir)
    config.algorithm.critic.parallel, config.algorithm.critic.ranks = "d1", RoleRanks.own
    rows = rows_of(config)
    assert [row.shards for row in rows] == [
        ("actor@dp0.tp0.pp0", "ref@dp0.tp0.pp0"),
        ("actor@dp0.tp1.pp0", "ref@dp0.tp1.pp0"),
        ("actor@dp1.tp0.pp0",),
        ("actor@dp1.tp1.pp0",),
        ("critic@dp0.tp0.pp0",),
    ]
    assert [row.need.moments > 0 for row in rows] == [True] * 5
    assert rows[0].need.weights > rows[2].need.weights
    assert rows[0].need.gradients == rows[2].need.gradients, "the reference model has no gradients"
    assert {(row.host, row.device) for row in rows} == {("127.0.0.1", "cpu")}


def test_a_moving_average_is_held_in_fp32(config: ExperimentConfig) -> None:
    config.trainer.device = Device.cpu
    config.algorithm.kl_coef = 0.1
    config.model.dtype = Dtype.bfloat16
    frozen = rows_of(config)[0].need.weights
    config.algorithm.reference.mode = ReferenceMode.ema
    average = rows_of(config)[0].need.weights
    values = sum(tensor.numel() for tensor in load_file(Path(str(config.model.path)) / "model.safetensors").values())
    assert (frozen, average) == ((6 + 2) * values, (6 + 4) * values)


def row(worker: int, gpu: str | None, gib: float, checkpointed: float | None = None) -> RankRow:
    fixed = RUNTIME_BYTES["cpu" if gpu is None else "gpu"]
    activations = round(gib * GIB) - fixed
    saved = round((gib if checkpointed is None else checkpointed) * GIB) - fixed
    return RankRow(worker, "here", gpu, ("actor@dp0.tp0.pp0",), MemoryNeed(activations=activations, checkpointed=saved))


def test_a_rank_that_does_not_fit_its_gpu_is_named_with_what_to_do() -> None:
    gpus = {"0": 80 * GIB, "1": 80 * GIB}
    assert warnings([row(0, "0", 80), row(1, "1", 80)], 1, gpus) == []
    (message,) = warnings([row(0, "0", 80), row(1, "1", 90, 70)], 1, gpus)
    assert message.startswith(
        "rank 1 will need 90.0 GiB (1.5 of them for libraries), and GPU 1 has, beside the servers on it, 80.0 GiB; "
    )
    assert "it fits with gradient checkpointing (70.0 GiB)" in message
    (message,) = warnings([row(0, "0", 90, 85)], 1, gpus)
    assert "85.0 GiB (1.5 of them for libraries) even with gradient checkpointing" in message
    assert "shard over more ranks (d), cut into more slices or stages (t, p), or lower" in message
    (message,) = warnings([row(0, "7", 1)], 1, gpus)
    assert "the memory of GPU 7 is unknown" in message


def test_what_sglang_takes_of_a_shared_gpu_is_not_a_ranks(
    config: ExperimentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpus" / "one").mkdir(parents=True)
    monkeypatch.setattr(hardware, "_GPUS", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config.generation.sglang.args = {"mem-fraction-static": 0.25}
    assert beside_servers(config, {"0": 80 * GIB}) == {"0": 80 * GIB}, "the embedded engine takes what it needs"
    config.generation.backend = "sglang"
    assert beside_servers(config, {"0": 80 * GIB}) == {"0": 60 * GIB}
    config.generation.servers = 2
    assert beside_servers(config, {"0": 80 * GIB, "1": GIB}) == {"0": 45 * GIB, "1": GIB}


def test_colocated_servers_and_ranks_count_with_the_larger_of_both(
    config: ExperimentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpus" / "one").mkdir(parents=True)
    monkeypatch.setattr(hardware, "_GPUS", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config.generation.colocated, config.generation.backend = "all", "sglang"
    config.generation.sglang.args = {"mem_fraction_static": 0.8}
    assert beside_servers(config, {"0": 80 * GIB}) == {"0": 80 * GIB}
    config.generation.backend, config.generation.max_total_tokens = "embedded", 1 << 24
    rows, graph = rows_of(config), load_graph(config)
    model = _models(config, graph, placement(config, graph), None)["actor"]
    (kept,) = shared_devices(config, model, [("0", rows[0].need)], GIB)
    sizes = model.sizes
    cache = 2 * (sizes.layers + 1) * sizes.key_value_heads * sizes.head_size * config.generation.max_total_tokens * 2
    assert kept.serving == 2 * model.numel + cache
    with monkeypatch.context() as patched:
        patched.setattr(type(config.generation.engine), "memory_is_counted", False)
        (unknown,) = shared_devices(config, model, [("0", rows[0].need)], GIB)
    assert unknown.serving == 2 * model.numel + cache * sizes.layers // (sizes.layers + 1), "its spare layer is its own"
    assert (kept.training, kept.kept) == (rows[0].need.total, rows[0].need.kept)
    assert kept.peak == kept.kept + kept.serving + 2 * GIB > kept.training + 2 * GIB
    config.trainer.offload = True
    (away,) = shared_devices(config, model, [("0", rows[0].need)], GIB)
    assert (away.kept, away.peak) == (0, away.serving + 2 * GIB)
    assert problems([away], {"0": away.peak}) == []
    (message,) = problems([away], {"0": away.peak - GIB // 2})
    assert "0.5 GiB are missing" in message
    config.generation.max_total_tokens = 1024
    (small,) = shared_devices(config, model, [("0", rows[0].need)], GIB)
    assert small.peak == small.training + 2 * GIB
    monkeypatch.setattr("asyncrl.launch.show_allocation.gpu_details", lambda: {"0": hardware.Gpu("tiny", GIB)})
    assert show_allocation(config, None) == EXIT_CONFIG
    assert "in turns with colocated servers" in capsys.readouterr().out
    (refused,) = colocation_errors(config)
    assert "GPU 0 needs" in refused


def test_ranks_on_the_cpu_share_the_machines_memory() -> None:
    rows = [row(0, None, 3), row(1, None, 3)]
    assert warnings(rows, 6 * GIB, {}) == []
    (message,) = warnings(rows, 6 * GIB - 1, {})
    assert message.startswith("the 2 ranks on the CPU together will need 6.0 GiB (1.0 of them for libraries) even")


def test_what_is_kept_in_host_memory_is_counted_there(
    config: ExperimentConfig, llama_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    config.trainer.device, config.model.path = Device.cpu, str(llama_dir)
    config.algorithm.kl_coef = 0.1
    (here,) = rows_of(config)
    config.trainer.offload = True
    (away,) = rows_of(config)
    assert here.need.host == 0
    assert away.need.host == here.need.weights + here.need.moments
    assert away.need.weights < here.need.weights, "the reference model is not there while the actor works"
    assert show_allocation(config, None) == 0
    config.trainer.gradient_checkpointing, config.trainer.activations_on = True, KeptOn.host
    (moved,) = rows_of(config)
    assert moved.need.on_host == away.need.on_host + moved.need.host_inputs > away.need.on_host
    assert "peak  host" in " ".join(capsys.readouterr().out.split()).replace(" host", "  host")


def test_the_in_memory_checkpoint_is_two_states_of_what_is_trained(
    config: ExperimentConfig, llama_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    config.trainer.device, config.model.path, config.model.dtype = Device.cpu, str(llama_dir), Dtype.bfloat16
    placed, graph = placement(config, load_graph(config)), load_graph(config)
    values = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(llama_dir).parameters())
    assert memory_checkpoint_bytes(config, graph, placed, None) == 2 * 12 * values
    assert show_allocation(config, None) == 0
    out = capsys.readouterr().out
    assert "in-memory checkpoint: " in out
    assert "each generation server, in GiB: weights " in out
    config.checkpoint.in_memory = False
    assert memory_checkpoint_bytes(config, graph, placed, None) == 0
    assert show_allocation(config, None) == 0
    assert "in-memory" not in capsys.readouterr().out


def test_adapters_are_trained_in_place_of_the_weights(config: ExperimentConfig, llama_dir: Path) -> None:
    config.trainer.device, config.model.path, config.model.dtype = Device.cpu, str(llama_dir), Dtype.bfloat16
    (whole,) = rows_of(config)
    config.model.lora.rank = 4
    model = AutoModelForCausalLM.from_pretrained(llama_dir)
    frozen = 2 * sum(parameter.numel() for parameter in model.parameters())
    matrices = [module.weight for module in model.model.layers.modules() if isinstance(module, nn.Linear)]
    adapters = 4 * sum(sum(matrix.shape) for matrix in matrices)
    (row,) = rows_of(config)
    assert (row.need.weights, row.need.gradients, row.need.moments) == (
        frozen + 6 * adapters,
        4 * adapters,
        8 * adapters,
    )
    assert row.need.kept < whole.need.kept
    placed, graph = placement(config, load_graph(config)), load_graph(config)
    assert memory_checkpoint_bytes(config, graph, placed, None) == 2 * 12 * adapters
    config.model.lora.targets = ["q_proj"]
    (fewer,) = rows_of(config)
    assert fewer.need.gradients < row.need.gradients


def test_a_host_too_small_for_what_its_gpus_put_there_is_said() -> None:
    (message,) = warnings([RankRow(0, "here", "0", (), MemoryNeed(host=5 * GIB))], 4 * GIB, {"0": 80 * GIB})
    assert message.startswith(
        "roles, moments and activations that are kept in host memory need 5.0 GiB of it, and this machine has"
    )


def test_the_table_of_a_model_that_is_not_made_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    overrides = [f"fileroot={tmp_path}", "trainer.parallel=d2", "trainer.device=cpu", "algorithm.kl_coef=0.1"]
    assert show_allocation(load_experiment("async_ppo", overrides), None) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 training ranks, actor d2, engine sharded, ")
    assert any("actor@dp1.tp0.pp0" in line and "127.0.0.1" in line for line in lines)
    assert sum("ref@dp" in line for line in lines) == 2
    assert not list(tmp_path.iterdir()), "nothing was made"


def test_a_narrow_terminal_gets_a_line_for_each_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert show_allocation(load_experiment("async_ppo", [f"fileroot={tmp_path}", "trainer.device=cpu"]), None) == 0
    first, _, _, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("1 training rank, ")
    expected = "rank host device roles weights gradients moments gathered activations logits peak in-memory each"
    assert [line.split()[0] for line in lines if line] == expected.split()
    assert max(map(len, lines[:-1])) <= 80


def test_a_supervised_experiment_has_no_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_allocation(load_experiment("sft", []), None) == 1
    assert "no layout" in capsys.readouterr().err


@pytest.fixture(scope="module")
def sizing() -> ModuleType:
    """The script that writes docs/sizing.md."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module("sizing")


def test_the_sizing_page_is_what_its_script_writes(sizing: ModuleType) -> None:
    text = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
    found = json.loads(sizing.MEASURED.read_text(encoding="utf-8"))
    assert text == sizing.page(text, found), "run python benchmarks/sizing.py"
    assert all(f"## {name}\n" in text for name in sizing.MODELS)


def test_measured_memory_is_what_is_computed(sizing: ModuleType) -> None:
    found = json.loads(sizing.MEASURED.read_text(encoding="utf-8"))
    for row in found["small"]:
        case = sizing.Case(**row["case"])
        assert case.peak(case.computed(sizing.SMALL)) == pytest.approx(row["peak"], rel=0.15)
    for row in found["lengths"]:
        case = sizing.Case(**row["case"])
        computed = case.computed(sizing.NARROW)
        assert case.passing(computed) == pytest.approx(row["peak"], rel=0.1)
        assert computed.host_inputs == row["host_bytes"]


@pytest.mark.parametrize(("name", "gpus"), [("async_grpo_1gpu", 1), ("async_grpo_8gpu", 8)])
def test_the_experiments_for_gpus_start_where_there_are_as_many(
    name: str, gpus: int, tmp_path: Path, tiny_chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every check of a start but that of the GPUs themselves, which are folders here."""
    (tmp_path / "score.py").write_text("def score(data, completion):\n    return 1.0\n")
    for each in ("dataset", "eval"):
        (tmp_path / f"{each}.jsonl").write_text(f'{{"prompt": "of {each}: 1+1=", "answer": "2"}}\n')
    given = [f"model.path={tiny_chat_model}", f"fileroot={tmp_path}", f"reward.path={tmp_path / 'score.py'}:score"]
    given += [f"{each}.path={tmp_path / f'{each}.jsonl'}" for each in ("dataset", "eval")]
    config = load_experiment(name, [*given, f"generation.sglang.python={sys.executable}"])
    assert isinstance(config, ExperimentConfig)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "_GPUS", tmp_path / "gpus")
    with pytest.raises(ConfigError, match="this machine shows no NVIDIA GPU"):
        validate(config)
    for gpu in range(gpus):
        (tmp_path / "gpus" / str(gpu)).mkdir(parents=True)
    validate(config)
    assert not before_start.warnings(config)
    servers = [plan for plan in plan_workers(config) if plan.kind == GENERATION_SERVER]
    used = [gpu for row in rows_of(config) for gpu in [row.gpu]] + [gpu for p in servers for gpu in p.resources.gpus]
    assert set(used) == {str(gpu) for gpu in range(gpus)}
    config.generation.backend = "embedded"
    (warning,) = before_start.warnings(config)
    assert warning.startswith("generation.backend='embedded': on a GPU it is for tests and small models")
