from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory import context_length
from asyncrl.config.setting import Device, Dtype
from asyncrl.inference.process import EngineStartError
from asyncrl.inference.program_host import BLOCK_SIZE, FIRST_PORT, NoFreePorts, PortBlock, reserve_ports
from asyncrl.inference.sglang.host import (
    DROPPED_FLAGS,
    OWNED_FLAGS,
    ServerCommand,
    SGLangHost,
    build_command,
    check_server,
    render_flags,
)


@pytest.fixture
def ports() -> PortBlock:
    return PortBlock(21000, socket.socket())


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 256, "vocab_size": 17}))
    return tmp_path


def command(config: ExperimentConfig, model_dir: Path, ports: PortBlock, **changes: object) -> ServerCommand:
    config.generation.backend = "sglang"
    arguments = {"device": "cpu", "secrets_file": Path("/run/secrets.yaml"), "scratch": Path("/run/x")} | changes
    return build_command(config, model_dir=model_dir, ports=ports, **arguments)


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_a_cpu_server_gets_torch_kernels_and_a_bounded_cache(model_dir: Path, ports: PortBlock) -> None:
    config = ExperimentConfig()
    built = command(config, model_dir, ports)
    assert flag(built.argv, "--device") == "cpu"
    assert flag(built.argv, "--attention-backend") == "torch_native"
    assert flag(built.argv, "--max-total-tokens") == "65536"
    assert flag(built.argv, "--max-running-requests") == "256"
    assert built.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert built.env["TMPDIR"] == "/run/x"


def test_a_gpu_server_is_left_to_size_itself(model_dir: Path, ports: PortBlock) -> None:
    config = ExperimentConfig()
    config.generation.sglang.tensor_parallel = 4
    built = command(config, model_dir, ports, device="cuda")
    assert flag(built.argv, "--tp-size") == "4"
    assert not {"--device", "--attention-backend", "--max-total-tokens", "--max-running-requests"} & set(built.argv)
    assert "SGLANG_USE_CPU_ENGINE" not in built.env


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_limits_that_are_set_are_kept_on_every_device(model_dir: Path, ports: PortBlock, device: str) -> None:
    config = ExperimentConfig()
    config.generation.max_running_requests, config.generation.max_total_tokens = 12, 3000
    built = command(config, model_dir, ports, device=device)
    assert flag(built.argv, "--max-running-requests") == "12"
    assert flag(built.argv, "--max-total-tokens") == "3000"


@pytest.mark.parametrize(
    ("device", "colocated", "saves"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_a_colocated_server_on_a_gpu_can_give_its_memory_back(
    device: str, colocated: bool, saves: bool, model_dir: Path, ports: PortBlock
) -> None:
    built = command(ExperimentConfig(), model_dir, ports, device=Device(device), colocated=colocated)
    assert ("--enable-memory-saver" in built.argv) == saves


def test_a_colocated_server_on_a_gpu_has_no_segments_that_grow_which_its_memory_saver_refuses(
    model_dir: Path, ports: PortBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8,expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    name, config = "PYTORCH_CUDA_ALLOC_CONF", ExperimentConfig()
    built = command(config, model_dir, ports, device=Device.cuda, colocated=True)
    assert built.env[name] == ""
    assert "PYTORCH_ALLOC_CONF" not in built.env
    assert name not in command(config, model_dir, ports, device=Device.cuda).env
    config.generation.sglang.env = {name: "backend:native"}
    assert command(config, model_dir, ports, device=Device.cuda, colocated=True).env[name] == "backend:native"


@pytest.mark.parametrize(
    ("dtype", "device", "given"),
    [("auto", "cpu", "float32"), ("auto", "cuda", "bfloat16"), ("float32", "cuda", "float32")],
)
def test_a_server_is_given_a_type_that_its_device_computes_well(
    dtype: str, device: str, given: str, model_dir: Path, ports: PortBlock
) -> None:
    config = ExperimentConfig()
    config.generation.dtype = Dtype(dtype)
    assert flag(command(config, model_dir, ports, device=Device(device)).argv, "--dtype") == given


OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of"


@pytest.mark.parametrize(
    ("line", "what_to_do"),
    [
        (OUT_OF_MEMORY, "lower generation.sglang.args.mem_fraction_static"),
        ("RuntimeError: CUDA error: out of memory", "lower generation.sglang.args.mem_fraction_static"),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: 0.1",
            "raise generation.sglang.args.mem_fraction_static",
        ),
        ("RuntimeError: boom", ""),
    ],
)
def test_a_start_that_failed_for_memory_is_told_apart_by_its_log(line: str, what_to_do: str) -> None:
    after = [f"line {number}" for number in range(60)]
    for lines, first_error in (([*after, line], line), (after, line)):  # a log's end need not hold the cause
        message = SGLangHost.explained("SGLang ended", lines, first_error).splitlines()
        assert message[0] == "SGLang ended; the end of its log:"
        assert f"the first error in its log: {line}" in message[-2:]
        assert bool(SGLangHost.advice([line])) == bool(what_to_do)
        assert what_to_do in message[-1]


def test_every_port_comes_from_the_reserved_block(model_dir: Path, ports: PortBlock) -> None:
    config = ExperimentConfig()
    built = command(config, model_dir, ports)
    assert built.url == "https://127.0.0.1:21000"
    assert command(config, model_dir, ports, secrets_file=None).url == "http://127.0.0.1:21000"
    assert flag(built.argv, "--port") == "21000"
    assert flag(built.argv, "--nccl-port") == "21001"
    assert "--dist-init-addr" not in built.argv
    config.generation.sglang.args = {"enable_dp_attention": True, "dp_size": 2}
    assert flag(command(config, model_dir, ports).argv, "--dist-init-addr") == "127.0.0.1:21002"


def test_the_key_is_in_a_file_and_never_on_the_command_line(model_dir: Path, ports: PortBlock) -> None:
    with_key = command(ExperimentConfig(), model_dir, ports)
    assert flag(with_key.argv, "--config") == "/run/secrets.yaml"
    assert "--api-key" not in with_key.argv
    assert "--config" not in command(ExperimentConfig(), model_dir, ports, secrets_file=None).argv


def test_the_users_arguments_and_environment_win(model_dir: Path, ports: PortBlock) -> None:
    config = ExperimentConfig()
    config.generation.sglang.args = {"mem-fraction-static": 0.7, "sleep_on_idle": False, "skip_tokenizer_init": None}
    config.generation.sglang.env = {"OMP_NUM_THREADS": "8"}
    built = command(config, model_dir, ports)
    assert flag(built.argv, "--mem-fraction-static") == "0.7"
    assert not {"--sleep-on-idle", "--skip-tokenizer-init"} & set(built.argv)
    assert built.env["OMP_NUM_THREADS"] == "8"


def test_servers_compute_logits_in_float32_where_the_training_ranks_do(model_dir: Path, ports: PortBlock) -> None:
    config = ExperimentConfig()
    assert "--enable-fp32-lm-head" not in command(config, model_dir, ports).argv
    config.model.float32_head = True
    assert "--enable-fp32-lm-head" in command(config, model_dir, ports).argv


@pytest.mark.parametrize(("answer", "refused"), [({"enable_fp32_lm_head": True}, False), ({}, True), (None, True)])
async def test_an_adopted_server_that_rounds_logits_is_refused_where_the_training_ranks_do_not(
    answer: Any, refused: bool, model_dir: Path
) -> None:
    async def server_info(request: web.Request) -> web.Response:
        return web.json_response(answer)

    app = web.Application()
    app.router.add_get("/server_info", server_info)
    async with TestServer(app) as server:
        url, config = str(server.make_url("")).rstrip("/"), ExperimentConfig()
        config.generation.backend, config.generation.sglang.urls = "sglang", [url]
        config.model.path = str(model_dir)
        await check_server(url, config, None)
        config.model.float32_head = True
        if not refused:
            await check_server(url, config, None)
            return
        with pytest.raises(EngineStartError, match=r"model.float32_head=true: .* --enable-fp32-lm-head, or use false"):
            await check_server(url, config, None)


def test_updates_that_leave_the_cache_in_place_want_no_shared_prefixes_and_no_step_ahead(
    model_dir: Path, ports: PortBlock
) -> None:
    config = ExperimentConfig()
    flags = {"--disable-radix-cache", "--disable-overlap-schedule"}
    assert not flags & set(command(config, model_dir, ports, device="cuda").argv)
    config.manager.update_mode = "in_place"
    assert flags <= set(command(config, model_dir, ports, device="cuda").argv)


@pytest.mark.parametrize("name", sorted(OWNED_FLAGS | DROPPED_FLAGS))
def test_a_flag_that_another_setting_owns_or_that_is_gone_is_refused_with_what_to_use(
    name: str, model_dir: Path, ports: PortBlock
) -> None:
    config = ExperimentConfig()
    config.generation.sglang.args = {name.replace("_", "-"): 1}
    with pytest.raises(ValueError, match=r"generation\.sglang\.args") as caught:
        command(config, model_dir, ports)
    assert (OWNED_FLAGS | DROPPED_FLAGS)[name] in str(caught.value)


def test_flags_render_by_the_type_of_their_value() -> None:
    flags = {"a_b": True, "c": False, "d": None, "e": [1, 2], "f": {"x": 1}, "g": 0.5, "h": 0}
    assert render_flags(flags) == ["--a-b", "--e", "1", "2", "--f", '{"x": 1}', "--g", "0.5", "--h", "0"]


@pytest.mark.parametrize(
    ("setting", "positions", "expected"), [(0, 4096, 624), (100, 4096, 100), (0, 256, 256), (1000, 256, 256)]
)
def test_context_is_what_is_needed_or_set_within_the_models_positions(
    setting: int, positions: int, expected: int
) -> None:
    config = ExperimentConfig()
    config.dataset.max_prompt_tokens, config.generation.context_length = 512, setting
    assert context_length(config, {"max_position_embeddings": positions}) == expected
    assert context_length(config, {"text_config": {"max_position_embeddings": positions}}) == expected


@pytest.mark.parametrize(("positions", "served"), [(4096, 108), (104, 104)])
def test_sglang_has_room_for_what_it_keeps_for_itself(
    positions: int, served: int, tmp_path: Path, ports: PortBlock
) -> None:
    """It refuses inputs within a few tokens of its limit, as the end of an interrupted answer is."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    config = ExperimentConfig()
    config.generation.context_length = 100
    argv = command(config, tmp_path, ports).argv
    assert argv[argv.index("--context-length") + 1] == str(served)


def test_two_reservations_never_share_a_port() -> None:
    blocks = [reserve_ports("127.0.0.1") for _ in range(20)]
    taken = [port for block in blocks for port in range(block.base, block.base + BLOCK_SIZE)]
    assert len(set(taken)) == len(taken)
    for block in blocks:
        block.release()


def two_blocks() -> tuple[PortBlock, PortBlock]:
    """One after the other, below what runs beside this test choose from."""
    while True:
        first = reserve_ports("127.0.0.1", first=FIRST_PORT // 2, last=FIRST_PORT - 1 - BLOCK_SIZE)
        next_base = first.base + BLOCK_SIZE
        with contextlib.suppress(NoFreePorts):
            return first, reserve_ports("127.0.0.1", first=next_base, last=next_base + BLOCK_SIZE - 1)
        first.release()


def test_a_released_block_can_be_reserved_again() -> None:
    first, other = two_blocks()
    base, last = first.base, first.base + BLOCK_SIZE - 1
    with pytest.raises(NoFreePorts, match=f"{base}-{last}"):
        reserve_ports("127.0.0.1", first=base, last=last)
    first.release()
    second = reserve_ports("127.0.0.1", first=base, last=last)
    assert second.base == base
    second.release()
    other.release()


def test_a_block_with_a_strangers_port_in_it_is_passed_over() -> None:
    first, second = two_blocks()
    first.release()
    second.release()
    with socket.create_server(("127.0.0.1", first.base + 5)):
        block = reserve_ports("127.0.0.1", first=first.base, last=second.base + BLOCK_SIZE - 1)
    assert block.base == second.base
    block.release()
