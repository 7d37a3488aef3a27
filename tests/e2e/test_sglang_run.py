"""The whole system against a real SGLang server, started as its child."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.observe.samples import read_samples, sample_files
from asyncrl.weights.logprob_probe import read_probe

from ..conftest import LIMIT_S, SGLANG_ENV, SHARED_MEMORY, left_in_memory
from ..ports import free_ports
from .clusters import await_that

PYTHON = os.environ.get("ASYNCRL_SGLANG_PYTHON")


needs_sglang = pytest.mark.skipif(PYTHON is None, reason="ASYNCRL_SGLANG_PYTHON names no interpreter with SGLang")


@pytest.mark.slow
@pytest.mark.sglang
@needs_sglang
@pytest.mark.parametrize(
    ("transport", "ranks", "mode", "lora"),
    [("tensor", 2, "interrupt", 4), ("distributed", 1, "in_place", 0)],
)
def test_a_run_takes_its_weights_from_the_trainers_memory(
    start_run: Any, transport: str, ranks: int, mode: str, lora: int
) -> None:
    """One of several ranks sends. Only the last version is written to disk. Adapters are merged. How weights come from
    disk, `tests/integration/test_generation_contract.py` shows; that each server is sent to apart from the others,
    `tests/integration/test_weight_sender.py`.
    """
    shared_memory = set(SHARED_MEMORY.iterdir())
    run = start_run(
        generation__backend="sglang",
        generation__sglang__python=PYTHON,
        **{f"+generation.sglang.env.{name}": value for name, value in SGLANG_ENV.items()},
        generation__device="cpu",
        manager__weight_transport=transport,
        manager__update_mode=mode,
        model__lora__rank=lora,
        trainer__parallel=f"d{ranks}",
        rollout__sampling__temperature=0.7,
        rollout__sampling__top_p=0.9,
        total_train_steps=3,
        max_head_offpolicyness=1,
        checkpoint__interval=0,
        eval__interval=0,
    )
    assert run.wait() == 0, run.output + run.logs()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["staleness/max"] for row in rows) <= 1  # so version 1 was served before step 3
    assert rows[0]["ppo/behave_kl"] < 1e-8, "SGLang's log-probabilities of version 0 are not the trainer's"
    assert rows[0]["ppo/behave_imp_weight_max"] == pytest.approx(1.0, abs=1e-4)
    assert max(row["ppo/behave_kl"] for row in rows) < 1e-2
    log = (run.run_dir / "logs" / "gserver_manager-0.log").read_text()
    assert "does not serve the trainer's" not in log
    if mode == "interrupt":  # else a server is checked while it serves, and a newer version may overtake the check
        assert re.findall(r"generation server \d agrees with the trainer on v\d", log), log
    assert [path.name for path in (run.run_dir / "weights" / "actor").glob("v*")] == ["v3"]
    assert (run.run_dir / "weights" / "actor" / "v3" / "model.safetensors").is_file()
    counts = run.summary()["books"]
    assert counts["submitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["abandoned"]
    assert run.survivors() == []
    assert left_in_memory(run.run_dir, shared_memory) == []


@pytest.mark.slow
@pytest.mark.sglang
@needs_sglang
def test_pictures_are_what_the_trainer_sees_through_updates_of_the_vision_tower(
    start_run: Any, vlm_folder: Callable[[str], Path]
) -> None:
    """A tower that SGLang remembers from an earlier version would show in the check of each update, which asks for the
    same picture. What more there is to pictures than these numbers, the run of the embedded engine's pictures shows.
    """
    run = start_run(
        "vlm_shapes",
        experiment_name="vlm_shapes",
        model__path=vlm_folder("qwen2_5_vl"),
        dataset__max_prompt_tokens=None,
        rollout__sampling__max_new_tokens=4,
        generation__backend="sglang",
        generation__sglang__python=PYTHON,
        **{f"+generation.sglang.env.{name}": value for name, value in SGLANG_ENV.items()},
        generation__device="cpu",
        total_train_steps=3,
        max_head_offpolicyness=0,
        train_batch_size=4,
        group_size=4,
        optimizer__lr=1e-3,
        checkpoint__interval=0,
        eval__interval=0,
        samples__every=1,
    )
    assert run.wait() == 0, run.output + run.logs()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert 0 < max(row["ppo/engine_gap_max"] for row in rows) < 1e-4, "server and trainer see other pictures"
    assert min(row["grad_norm"] for row in rows) > 0
    assert all(len(row["pictures"]) == 1 for row in read_samples(sample_files(run.run_dir / "samples")))
    probe = read_probe(run.run_dir / "weights" / "actor" / "v3")
    assert probe is not None
    assert probe.sequences[-1].picture is not None
    log = (run.run_dir / "logs" / "gserver_manager-0.log").read_text()
    assert "does not serve the trainer's" not in log
    assert re.findall(r"agrees with the trainer on v[123]", log), log


@pytest.fixture
def somebodys_server(tiny_model: Path, tmp_path: Path) -> Iterator[str]:
    """Address of a real SGLang server of the tiny model that no run knows, started with SGLang's own defaults; but it
    sleeps while nobody asks, where it would take a processor.
    """
    (port,) = free_ports(1)
    flags = {"model-path": tiny_model, "port": port, "device": "cpu", "attention-backend": "torch_native"}
    flags |= {"sampling-backend": "pytorch", "max-total-tokens": 2048, "max-running-requests": 16}
    argv = [str(PYTHON), "-m", "sglang.launch_server", "--disable-cuda-graph", "--skip-server-warmup"]
    argv += ["--sleep-on-idle"]
    argv += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    env = {**os.environ, **SGLANG_ENV, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "somebodys_server.log").open("w") as log:
        process = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + LIMIT_S
        while not answers(f"{url}/health"):
            assert process.poll() is None, (tmp_path / "somebodys_server.log").read_text()
            assert time.monotonic() < until, (tmp_path / "somebodys_server.log").read_text()
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


JUDGED = """
from asyncrl.api import Agent, GenerationRequest


class Judged(Agent):
    "An answer, the verdict of a judge that is trained too, and the word of a critic that nobody here trains."

    def __init__(self, tokenizer):
        pass

    async def run(self, prompt, env, client):
        ids = list(prompt.input_ids)
        judge, critic = client.policy("judge"), client.policy("critic")
        said = []
        for number, asked in enumerate((client, judge, critic)):
            request = GenerationRequest(f"{prompt.prompt_id}/{prompt.member}/{number}", tuple(ids), 1, prompt.sampling)
            (answer,) = (await asked.generate(request)).completions
            said.append(answer)
            ids += answer.token_ids
        assert set(said[2].versions) == {0}
        assert critic.samples() == []
        parity = len(said[2].token_ids) % 2
        agrees = len(said[1].token_ids) % 2 == parity
        return client.samples(float(len(said[0].token_ids) > 2)) + judge.samples(float(agrees))
"""


@pytest.mark.slow
@pytest.mark.sglang
@needs_sglang
def test_two_trained_policies_on_sglang_ask_a_third_on_a_server_of_somebody_else(
    start_run: Any, command: Any, somebodys_server: str, tmp_path: Path
) -> None:
    (tmp_path / "judged.py").write_text(JUDGED)
    judge, critic = (
        "{name: judge, trained: true, optimizer: {lr: 1e-3}}",
        f"{{name: critic, url: '{somebodys_server}'}}",
    )
    run = start_run(
        agent__path=f"{tmp_path / 'judged.py'}:Judged",
        policies=f"[{judge}, {critic}]",
        generation__backend="sglang",
        generation__sglang__python=PYTHON,
        **{f"+generation.sglang.env.{name}": value for name, value in SGLANG_ENV.items()},
        generation__device="cpu",
        rollout__sampling__max_new_tokens=6,
        optimizer__lr=1e-3,
        total_train_steps=3,
        max_head_offpolicyness=0,
        checkpoint__interval=0,
        eval__interval=0,
    )
    assert run.wait() == 0, run.output + run.logs()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["staleness/max"] for row in rows) == 0, "a server of either policy lags behind its newest version"
    for policy in ("", "policy/judge/"):
        assert max(row[f"{policy}ppo/behave_kl"] for row in rows) < 1e-6, "the servers have other weights"
        assert max(row[f"{policy}grad_norm"] for row in rows) > 0
    assert {folder.name for folder in (run.run_dir / "weights").iterdir()} == {"actor", "judge"}
    assert command("audit", run.run_dir).code == 0
    await_that(lambda: answers(f"{somebodys_server}/health"), "word of somebody else's server: the run has ended it")
