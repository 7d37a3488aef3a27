"""Whatever process dies, however often: the run finishes by itself, its files prove it, and it learns as without."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REWARD, SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LIMIT_S = 1700.0
STEPS = 26
STEPS_OF_TWO = 24
LEARNED = 0.9
"""Mean reward of the last steps from which a run has learned to write even digits: the share of them in its answers. It
begins at 0.3 to 0.4; without any fault seeds 1 to 3 come to 0.97 and more."""
LEARNED_OF_TWO = 0.6
"""Two policies share the samples of a step, and so learn half as fast."""
LAST = 5
SERVERS = {"generation_server", "policy_server"}
KINDS = {*SERVERS, "rollout_worker", "gserver_manager", "master_worker", "model_worker", "launcher"}
AGENT = """
from asyncrl.api import Agent, GenerationRequest


class Match(Agent):
    def __init__(self, tokenizer):
        self._decode = tokenizer.decode

    async def run(self, prompt, env, client):
        "Two trained policies write even digits, and an older version of the first is asked too."
        samples = []
        for player in (client, client.policy("judge"), client.policy("past")):
            request = GenerationRequest(prompt.prompt_id, prompt.input_ids, 1, prompt.sampling)
            answer = self._decode((await player.generate(request)).completions[0].token_ids)
            if player is not client.policy("past"):
                samples += player.samples(sum(each in "02468" for each in answer) / max(len(answer), 1))
        return samples
"""
POLICIES = "[{name: judge, trained: true}, {name: past, versions: {every: 3, keep: 2}}]"


@dataclass
class Chaos:
    """A chaos run that ended."""

    code: int
    output: str
    run_dir: Path
    reported: dict[str, Any]
    """Its `--json`."""


class RunChaos:
    def __init__(self, root: Path, model: Path, command: Any) -> None:
        self._root = root
        self._command = command
        (root / "rewards.py").write_text(REWARD)
        self.agent = root / "match.py"
        self.agent.write_text(AGENT)
        reward = f"{root / 'rewards.py'}:even_digits"
        self._settings = SETTINGS | {"fileroot": root, "model.path": model, "reward.path": reward}
        self._settings |= {"group_size": 4, "optimizer.lr": 1e-2, "eval.interval": 13, "seed": 1}
        self._settings |= {"system.start_timeout_s": 400, "system.stall_timeout_s": 400}

    def __call__(self, *options: str, **overrides: Any) -> Chaos:
        settings = self._settings | {name.replace("__", "."): value for name, value in overrides.items()}
        file = self._root / "told.json"
        given = [f"{name}={value}" for name, value in settings.items()]
        ended = self._command("chaos", "async_ppo", *options, "--json", file, *given, limit_s=LIMIT_S)
        reported = json.loads(file.read_text()) if file.is_file() else {}
        (run_dir,) = (self._root / "tiny").glob("chaos-*/")
        return Chaos(ended.code, ended.output, run_dir, reported)


@pytest.fixture
def run_chaos(tmp_path: Path, tiny_model: Path, command: Any) -> Iterator[RunChaos]:
    """`run_chaos(*options, **overrides)` runs the command on the tiny model."""
    yield RunChaos(tmp_path, tiny_model, command)
    shutil.rmtree(tmp_path / "tiny", ignore_errors=True)


def check(ended: Chaos, faults: int, steps: int = STEPS, learned: float = LEARNED) -> dict[str, Any]:
    """The run finished by itself and learned, its files agree, the whole plan was done; its summary."""
    assert ended.code == 0, ended.output + logs(ended.run_dir)
    assert f"passed     {faults} faults; the run finished by itself" in ended.output
    assert ended.reported["exit_code"] == 0
    assert ended.reported["findings"] == ended.reported["wrong"] == ended.reported["not_done"] == []
    assert len(ended.reported["faults"]) == faults
    summary: dict[str, Any] = json.loads((ended.run_dir / "summary.json").read_text())
    counts = summary["books"]
    assert counts["submitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["abandoned"]
    rows = [json.loads(line) for line in (ended.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["step"]] == list(range(1, summary["steps"] + 1))
    assert summary["steps"] == steps
    assert counts["trained"] == steps * SETTINGS["train_batch_size"]
    rewards = [row["reward/mean"] for row in rows if row["step"]]
    assert rewards[0] < 0.5
    assert sum(rewards[-LAST:]) / LAST >= learned, rewards
    return summary


def logs(run_dir: Path) -> str:
    """The ends of all logs, for a failing assertion's message."""
    return "\n".join(f"--- {file.name}\n{file.read_text()[-1500:]}" for file in sorted(run_dir.glob("logs/*.log")))


def test_a_run_survives_a_kill_of_each_kind_of_process(run_chaos: RunChaos) -> None:
    """Two policies are trained, a third one is a pool of older versions.

    `tests/integration/master/test_any_death.py` covers deaths at every message in virtual time, `test_restart.py` and
    `tests/e2e/test_several_policies.py` those of one of two ranks.
    """
    options = [f"--kills={len(KINDS)}", "--every=2", "--seed=3", "--pauses=0", "--cuts=0", "--delays=0"]
    options += ["--full-disks=0"]
    several = {"agent__path": f"{run_chaos.agent}:Match", "policies": POLICIES}
    ended = run_chaos(
        *options,
        total_train_steps=STEPS_OF_TWO,
        generation__servers=2,
        rollout__workers=2,
        **several,
    )
    summary = check(ended, len(KINDS), STEPS_OF_TWO, LEARNED_OF_TWO)
    killed = [fault["fault"]["target"].partition("/")[0] for fault in ended.reported["faults"]]
    assert sorted(killed) == sorted(KINDS)
    assert set(summary["restarts"]) <= {*(f"{kind}/{i}" for kind in KINDS for i in (0, 1)), "the brain"}
    assert "system.restarts_per_process=8" in ended.output
    lines = ended.output.splitlines()
    head = next(index for index, line in enumerate(lines) if line.split()[:1] == ["#"])
    assert all(len(line) <= 80 for line in lines[head : head + len(KINDS) + 2])


def test_a_run_survives_pauses_and_broken_and_slow_connections(run_chaos: RunChaos) -> None:
    options = ["--kills=0", "--every=2", "--seed=5", "--pauses=2", "--cuts=3", "--delays=3", "--full-disks=1"]
    ended = run_chaos(*options, "--kinds=rollout_worker,model_worker", total_train_steps=STEPS)
    check(ended, 8)
    assert "left out: full disks: fileroot=" in ended.output
    connections = [fault["note"] for fault in ended.reported["faults"] if fault["fault"]["kind"] in ("cut", "delay")]
    assert len(connections) == 6
    assert any(not note.startswith("0 ") for note in connections), "nothing went through the proxies"
    assert summary_restarts(ended) == {}


def summary_restarts(ended: Chaos) -> dict[str, int]:
    restarts: dict[str, int] = json.loads((ended.run_dir / "summary.json").read_text())["restarts"]
    return restarts


def test_what_the_launcher_refuses_is_said_and_nothing_starts(tmp_path: Path, command: Any) -> None:
    settings = SETTINGS | {"total_train_steps": 30, "fileroot": tmp_path, "train_batch_size": 3}
    ended = command("chaos", "async_ppo", *(f"{name}={value}" for name, value in settings.items()))
    assert ended.code == 2, ended.output
    assert "error: train_batch_size=3" in ended.output or "trainer.ppo_minibatches" in ended.output
    assert not list(tmp_path.glob("tiny/*/logs"))
