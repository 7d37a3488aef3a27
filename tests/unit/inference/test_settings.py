"""The checks of the inference settings refuse invalid ones before anything is started."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from asyncrl.colocated.checks import check as colocation_problems
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device, Dtype
from asyncrl.inference.checks import check
from asyncrl.manager.settings import PolicyConfig
from asyncrl.runtime.process import hardware


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the driver lists this machine's GPUs; empty so far."""
    monkeypatch.setattr(hardware, "_GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def with_gpus(machine: Path, count: int) -> None:
    for index in range(count):
        (machine / f"0000:{index:02}:00.0").mkdir()


def config_of(backend: str = "embedded", device: str = "auto") -> ExperimentConfig:
    config = ExperimentConfig()
    config.generation.backend = backend
    config.generation.device = device
    config.generation.sglang.python = "/bin/true"
    return config


@pytest.mark.parametrize("backend", ["embedded", "sglang"])
def test_cuda_is_refused_where_there_is_none(backend: str, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = check(config_of(backend, "cuda"))
    assert message.startswith("generation.device='cuda': ")
    assert message.endswith("use cpu or auto")
    assert not list(check(config_of(backend, "auto")))
    with_gpus(machine, 2)
    assert not list(check(config_of(backend, "cuda")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert len(list(check(config_of(backend, "cuda")))) == 1


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_server_over_more_gpus_than_there_are_is_refused_but_many_servers_share_few(
    device: str, machine: Path
) -> None:
    with_gpus(machine, 2)
    config = config_of("sglang", device)
    config.trainer.device = Device.cpu
    config.generation.sglang.tensor_parallel = 2
    config.generation.sglang.args = {"mem_fraction_static": 0.1}
    config.generation.servers = 8
    assert not list(check(config))
    config.generation.sglang.tensor_parallel = 4
    assert list(check(config)) == ["generation.sglang.tensor_parallel=4: this machine has 2 GPUs; use 2 or less"]
    config.generation.device = "cpu"
    assert not list(check(config))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"pp_size": 2},
            r"=2, generation\.sglang\.args\.pp_size=2: a server takes 4, and this machine has 3",
        ),
        (
            {"dp_size": 2},
            r"=2, generation\.sglang\.args\.dp_size=2: a server takes 4, and this machine has 3",
        ),
        ({"pp_size": "two"}, r"args\.pp_size='two': it is a number of ranks; use 1 or more$"),
        ({"--dp-size": 0}, r"args\.dp_size=0: it is a number of ranks; use 1 or more$"),
        ({"attn_dp_size": 2, "enable_dp_attention": True}, r"enable_dp_attention=true: attn_dp_size says the same"),
        ({"nnodes": 2}, r"args\.nnodes=2: a server is started on one host; start one over several yourself"),
        (
            {"dp_size": 3, "enable_dp_attention": True},
            r"dp_size=3: with enable_dp_attention it divides .*=2",
        ),
    ],
)
def test_ranks_of_sglang_that_do_not_fit_are_refused_by_name(
    args: dict[str, object], message: str, machine: Path
) -> None:
    with_gpus(machine, 3)
    config = config_of("sglang")
    config.trainer.device = Device.cpu
    config.generation.sglang.tensor_parallel, config.generation.sglang.args = 2, {"mem_fraction_static": 0.1} | args
    (found,) = check(config)
    assert re.search(message, found)
    config.generation.sglang.args |= {"pp_size": 1, "--dp-size": 1, "dp_size": 1, "nnodes": 1, "attn_dp_size": 1}
    assert not list(check(config))


def test_gpus_that_training_takes_are_not_a_servers(machine: Path) -> None:
    with_gpus(machine, 4)
    config = config_of("sglang")
    config.trainer.parallel = "d3"
    config.generation.sglang.tensor_parallel = 2
    (message,) = check(config)
    assert message.startswith("generation.sglang.tensor_parallel=2: training ranks leave a server 1 GPU; use 1, fewer")
    config.trainer.parallel = "d2"
    assert not list(check(config))


def test_sglang_computes_float32_on_gpus_only_by_kernels_that_are_chosen_for_it(machine: Path) -> None:
    config = config_of("sglang")
    config.generation.dtype = Dtype.float32
    assert not list(check(config)), "on a CPU it does"
    with_gpus(machine, 2)
    (message,) = check(config)
    assert message.startswith("generation.dtype='float32': SGLang's attention kernels for GPUs compute in 16 bits; ")
    config.generation.sglang.args = {"attention-backend": "triton"}
    assert not list(check(config))
    config.generation.sglang.args = {}
    config.generation.dtype = Dtype.auto
    assert not list(check(config))


@pytest.mark.parametrize(
    ("gpus", "servers", "trainer", "shared"),
    [
        (1, 1, "auto", "generation_server/0 and model_worker/0 are both on GPU 0"),
        (2, 2, "auto", "generation_server/0 and generation_server/1 are both on GPU 1"),
        (1, 2, "cpu", "generation_server/0 and generation_server/1 are both on GPU 0"),
        (3, 2, "auto", ""),
        (1, 1, "cpu", ""),
        (0, 2, "auto", ""),
    ],
)
def test_sglang_on_a_gpu_that_it_shares_is_told_its_part_of_the_memory(
    gpus: int, servers: int, trainer: str, shared: str, machine: Path
) -> None:
    with_gpus(machine, gpus)
    config = config_of("sglang")
    config.generation.servers, config.trainer.device = servers, Device(trainer)
    messages = list(check(config))
    assert [shared in message for message in messages] == ([True] if shared else [])
    assert all("generation.sglang.args={mem_fraction_static: 0.3}" in message for message in messages)
    config.generation.sglang.args = {"mem-fraction-static": 0.3}
    assert not list(check(config))
    config.generation.sglang.args, config.generation.backend = {}, "embedded"
    assert not list(check(config))


@pytest.mark.parametrize(
    "url", ["10.0.0.1:30000", "ftp://a:1", "http://:30000", "http://a", "http://a:x", "http://a:0"]
)
def test_an_adopted_server_needs_an_http_address_with_host_and_port(url: str, machine: Path) -> None:
    config = config_of("sglang", "cuda")  # whose GPUs are not this machine's
    config.system.encrypt = False
    config.generation.sglang.urls = ["http://b:1", "https://[::1]:2/", url]
    assert list(check(config)) == [
        f"generation.sglang.urls={url!r}: not the address of a server; give http://host:port"
    ]


def test_a_server_is_adopted_once(machine: Path) -> None:
    config = config_of("sglang")
    config.generation.sglang.urls = ["https://a:1", "https://b:1", "https://a:1/"]
    assert list(check(config)) == ["generation.sglang.urls='https://a:1': given 2 times; name each server once"]


def test_a_limit_that_an_adopted_server_would_never_hear_of_is_refused(machine: Path) -> None:
    """Flags beside its address are those of servers that the run would start: shipped experiments have some."""
    config = config_of("sglang")
    config.generation.sglang.args = {"mem_fraction_static": 0.8}
    config.generation.sglang.urls, config.generation.max_running_requests = ["https://a:1"], 64
    assert list(check(config)) == [
        "generation.max_running_requests=64: a server in generation.sglang.urls has the limit that it was started "
        "with; give it to the server, and leave it out here"
    ]


def test_an_adopted_server_on_the_network_is_not_spoken_to_in_the_clear(machine: Path) -> None:
    config = config_of("sglang")
    config.system.host = "10.0.0.1"
    config.generation.sglang.urls = ["http://10.0.0.1:1", "http://127.0.0.1:1", "https://b:1", "http://10.0.0.2:1"]
    (fault,) = check(config)
    assert fault.startswith("generation.sglang.urls='http://10.0.0.2:1': ")
    assert "system.encrypt=false" in fault
    config.system.encrypt = False
    assert not list(check(config))


def test_log_probabilities_of_sglang_stay_at_the_sampling_temperature(machine: Path) -> None:
    config = config_of("sglang")
    config.generation.sglang.env = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    (message,) = check(config)
    assert message.startswith("generation.sglang.env.SGLANG_RETURN_ORIGINAL_LOGPROB: asyncrl sets it")


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("1", 1), ("0,1,2,3", 2), (" , ", 0)])
def test_gpus_are_those_left_visible(visible: str, count: int, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(machine, 2)
    assert hardware.count_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.count_gpus() == count


@pytest.mark.parametrize(("positions", "refused"), [(512, True), (1024, True), (1025, False), (None, False)])
def test_answers_that_leave_no_position_to_a_prompt_are_refused(
    positions: int | None, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": positions} if positions else {}))
    config = config_of()
    config.model.path, config.rollout.sampling.max_new_tokens = str(tmp_path), 1024
    messages = list(check(config))
    assert len(messages) == refused
    if refused:
        assert messages[0].startswith("rollout.sampling.max_new_tokens=1024: model.path=")
        assert f"takes {positions} tokens" in messages[0]


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("generation.colocated", "some", "none, all, or a number of the 2 servers"),
        ("generation.colocated", "3", "use all or 1 to 2"),
        ("samples.only", True, "samples.only"),
        ("samples.replay", "/somewhere", "samples.replay"),
        ("manager.update_mode", "in_place", "lose their cache"),
        ("manager.update_mode", "finish", "interrupted before each step"),
        ("manager.weight_transport", "tensor", "from the trainer's memory"),
        ("trainer.score_ahead", True, "trainer.score_ahead=false"),
        ("policies", [PolicyConfig("past")], "do not sleep"),
        ("system.shared_filesystem", False, "system.shared_filesystem=true"),
    ],
)
def test_what_excludes_colocated_servers_is_refused_by_name(setting: str, value: object, expected: str) -> None:
    config = config_of()
    config.generation.colocated, config.generation.servers = "all", 2
    assert list(colocation_problems(config)) == []
    group, _, leaf = setting.rpartition(".")
    setattr(vars(config)[group] if group else config, leaf, value)
    (message,) = colocation_problems(config)
    assert message.startswith("generation.colocated=")
    assert expected in message


def test_servers_of_others_cannot_be_colocated_servers() -> None:
    config = config_of("sglang")
    config.generation.colocated, config.generation.sglang.urls = "all", ["http://127.0.0.1:30000"]
    (message,) = colocation_problems(config)
    assert "generation.sglang.urls" in message


def test_servers_that_quantise_need_a_correction_and_weights_from_disk(machine: Path) -> None:
    sglang = config_of("sglang")
    sglang.generation.sglang.args = {"--quantization": "fp8"}
    (message,) = check(sglang)
    assert message.startswith("generation.dtype='auto': with generation.sglang.args.quantization='fp8' SGLang does not")
    sglang.generation.dtype = Dtype.bfloat16
    assert list(check(sglang)) == []
    sglang.manager.weight_transport = "tensor"
    (message,) = check(sglang)
    assert "generation.sglang.args.quantization='fp8'; use weight_transport=disk" in message
    sglang.manager.weight_transport = "disk"
    sglang.algorithm.policy_loss.name, sglang.algorithm.correction.name = "decoupled_ppo", "none"
    (message,) = check(sglang)
    assert message.startswith("algorithm.correction='none': generation.sglang.args.quantization='fp8' makes servers")
    assert message.endswith("use algorithm.correction.name=token_truncate")
    sglang.algorithm.policy_loss.name = "ppo_clip"
    assert list(check(sglang)) == [], "its ratio is to the policy that sampled"
