"""Two policies that are trained in one run: as the reference loop trains them, and as one policy and a frozen one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from asyncrl.algorithms.registry import Choice
from asyncrl.api import SamplingParams
from asyncrl.config.plugin_code.import_paths import load_plugin
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.reference import Actor, Critic, ReferenceConfig, ReferenceTrainer, StepReport
from asyncrl.trainer.model.value_models import Critic as CriticModel

pytestmark = pytest.mark.slow
STEPS = 6
TOLERANCE = 1e-5
CONFIG = ReferenceConfig(
    seed=7,
    train_batch_size=4,
    group_size=4,
    ppo_minibatches=2,
    lr=1e-3,
    sampling=SamplingParams(max_new_tokens=8, temperature=0.9),
)
JUDGE = replace(CONFIG, lr=3e-3, train_every=2, train_offset=1, advantage=Choice("dr_grpo"))
AGENT = """
from asyncrl.api import Agent, GenerationRequest


class Match(Agent):
    def __init__(self, tokenizer, past=False):
        self._past = past

    async def run(self, prompt, env, client):
        "A judge reads prompt and answer; an answer is paid by its length, the judge if its own is of the same parity."
        judge, name = client.policy("judge"), f"{prompt.prompt_id}/{prompt.member}"
        asked = GenerationRequest(name, prompt.input_ids, 1, prompt.sampling)
        answer = (await client.generate(asked)).completions[0].token_ids
        asked = GenerationRequest(f"{name}/judge", (*prompt.input_ids, *answer), 1, prompt.sampling)
        verdict = (await judge.generate(asked)).completions[0].token_ids
        if self._past:  # last: each further request of an episode with one seed draws other numbers
            asked = GenerationRequest(f"{name}/past", prompt.input_ids, 1, prompt.sampling)
            await client.policy("past").generate(asked)
        agrees = len(verdict) % 2 == len(answer) % 2
        return client.samples(float(len(answer) > 4)) + (judge.samples(float(agrees)) if prompt.order % 3 else [])
"""


@pytest.fixture(scope="module")
def agent_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Import path of the agent."""
    file = tmp_path_factory.mktemp("agents") / "match.py"
    file.write_text(AGENT)
    return f"{file}:Match"


def oracle(tiny_model: Path, agent_path: str, *, shared_critic: bool) -> list[StepReport]:
    """Return the reports of the reference loop, step by step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    models = [AutoModelForCausalLM.from_pretrained(tiny_model).eval() for _ in range(2)]
    own, judge, critic = CONFIG, JUDGE, None
    if shared_critic:
        own, judge = (replace(config, advantage=Choice("gae"), critic_lr=1e-3) for config in (own, judge))
        critic = Critic(own, CriticModel(AutoModel.from_pretrained(tiny_model).eval()))
    trainer = ReferenceTrainer(
        own,
        models[0],
        PromptFormat(load_tokenizer(tiny_model), None),
        ArithmeticDataset(seed=CONFIG.seed),
        lambda data, completion: 0.0,
        load_plugin(agent_path)(load_tokenizer(tiny_model)),
        {"judge": Actor(judge, models[1], critic)},
        critic,
    )
    reports = [trainer.train_step() for _ in range(STEPS)]
    torch.set_num_threads(threads)
    return reports


JUDGED = "{name: judge, trained: true, train_every: 2, train_offset: 1, optimizer: {lr: 3e-3}"
SAME_RANKS = {"trainer__parallel": "d2", "policies": f"[{JUDGED}, algorithm: {{advantage: {{name: dr_grpo}}}}}}]"}
OWN_RANKS = {
    "policies": f"[{JUDGED}, ranks: own, parallel: d2, shared_critic: true}}, "
    "{name: past, versions: {every: 2, keep: 2}}]",
    "agent__args__past": "true",
    "algorithm__graph": "ppo",
    "algorithm__advantage__name": "gae",
    "algorithm__critic__optimizer__lr": 1e-3,
}


def assert_evaluated_is(judge: Path, run: Any, command: Any, answers: Path) -> None:
    """`eval --policy judge` gives the greedy answers of the model in the folder `judge`."""
    agent = "asyncrl.plugins.agents.single_turn:SingleTurnAgent"
    alone = [f"agent.path={agent}", "policies=[]", "eval.size=4"]
    done = command("eval", run.run_dir, "--policy", "judge", "--out", answers, *alone)
    assert done.code == 0, done.output
    tokenizer, model = load_tokenizer(judge), AutoModelForCausalLM.from_pretrained(judge).eval()
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    for line in lines:
        prompt = torch.tensor([tokenizer.encode(line["prompt"])])
        reported = model.generate(prompt, max_new_tokens=CONFIG.sampling.max_new_tokens, do_sample=False)
        own = reported[0, prompt.shape[1] :][: line["generated_tokens"]].tolist()
        assert tokenizer.decode(own) == line["completion"]
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("settings", "dies"),
    [(SAME_RANKS, "model_worker/1"), (OWN_RANKS, "model_worker/2")],
    ids=["on the same ranks", "on ranks of its own with a shared critic, beside a pool"],
)
def test_both_policies_take_the_steps_of_the_reference_loop_over_deaths_of_their_processes(
    tiny_model: Path,
    start_run: Any,
    command: Any,
    agent_path: str,
    tmp_path: Path,
    settings: dict[str, Any],
    dies: str,
) -> None:
    shared_critic = settings is OWN_RANKS
    run = start_run(
        **settings,
        agent__path=agent_path,
        rollout__workers=2,
        seed=CONFIG.seed,
        train_batch_size=CONFIG.train_batch_size,
        group_size=CONFIG.group_size,
        trainer__ppo_minibatches=CONFIG.ppo_minibatches,
        optimizer__lr=CONFIG.lr,
        optimizer__schedule="constant",
        rollout__sampling__max_new_tokens=CONFIG.sampling.max_new_tokens,
        rollout__sampling__temperature=CONFIG.sampling.temperature,
        max_head_offpolicyness=0,
        total_train_steps=STEPS,
        eval__interval=0,
        checkpoint__interval=0,
        samples__every=1,
    )
    for step, worker in ((2, "policy_server/0"), (4, dies)):
        run.wait_for_step(step)
        run.worker(worker).kill()
    assert run.wait() == 0, run.output + run.logs()
    reports = oracle(tiny_model, agent_path, shared_critic=shared_critic)
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    losses = np.array([row["ppo/loss_per_minibatch"] for row in rows])
    np.testing.assert_allclose(losses, [report.losses for report in reports], rtol=0, atol=TOLERANCE)
    name = "policy/judge/ppo/loss_per_minibatch"
    trained = {row["step"]: row[name] for row in rows if name in row}
    assert trained.keys() == {report.version for report in reports if report.others} == set(range(2, STEPS + 1, 2))
    judged = [report.others["judge"].losses for report in reports if report.others]
    np.testing.assert_allclose(list(trained.values()), judged, rtol=0, atol=TOLERANCE)
    assert np.abs(judged).max() > 1000 * TOLERANCE
    if shared_critic:
        critic = [(row["critic/loss"], row.get("policy/judge/critic/loss")) for row in rows]
        expected = [
            tuple(np.mean(each.critic_losses) if each else None for each in (report, report.others.get("judge")))
            for report in reports
        ]
        assert [b is None for _, b in critic] == [b is None for _, b in expected]
        np.testing.assert_allclose(np.array(critic, float), np.array(expected, float), rtol=0, atol=TOLERANCE)
    assert {folder.name for folder in (run.run_dir / "weights").iterdir()} == {"actor", "judge"}
    spans = map(json.loads, (run.run_dir / "observed" / "gserver_manager-0.jsonl").read_text().splitlines())
    updated = {span["lane"] for span in spans if span.get("span") == "update"}
    assert updated == {"generation_server/0", "policy_server/0", *(["policy_server/1"] if shared_critic else [])}
    met = [row["policy_server/past/newest_version"] for row in rows if "policy_server/past/newest_version" in row]
    assert (met[0] == 0 and max(met) >= 2) if shared_critic else not met, "older selves of the run's own policy"
    assert command("audit", run.run_dir).code == 0
    assert command("export", run.run_dir, "--policy", "judge", tmp_path / "judge").code == 0
    exported, published = (
        load_file(next(folder.glob("*.safetensors")))
        for folder in (tmp_path / "judge", run.run_dir / "weights" / "judge" / f"v{STEPS}")
    )
    assert all(torch.equal(tensor, exported[name]) for name, tensor in published.items())
    if not shared_critic:
        assert_evaluated_is(tmp_path / "judge", run, command, tmp_path / "answers.jsonl")
    assert "trains no policy 'past'" in command("export", run.run_dir, "--policy", "past", tmp_path / "past").output
