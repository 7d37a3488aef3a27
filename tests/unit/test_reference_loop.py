from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from asyncrl.api import Sample, SamplingParams
from asyncrl.data.chat_template import ChatTemplate
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import CharTokenizer
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.reference import (
    ReferenceConfig,
    ReferenceTrainer,
    StepReport,
    TrainSample,
    packed_logprobs,
)

TOKENIZER = CharTokenizer()
CONFIG = ReferenceConfig(
    seed=3, train_batch_size=4, group_size=4, ppo_minibatches=2, lr=1e-2, sampling=SamplingParams(max_new_tokens=12)
)


def tiny_model(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=TOKENIZER.eos_token_id,
    )
    return cast(PreTrainedModel, Qwen2ForCausalLM(config).eval())


def length_reward(data: object, completion: str) -> float:
    """A reward that differs within nearly every group of a random model."""
    return float(len(completion) % 3)


def trainer(config: ReferenceConfig = CONFIG, reward: object = length_reward) -> ReferenceTrainer:
    dataset = ArithmeticDataset(num_rows=32, max_numbers=3)
    return ReferenceTrainer(config, tiny_model(), PromptFormat(TOKENIZER, None), dataset, reward)  # type: ignore[arg-type]


def run(config: ReferenceConfig = CONFIG, steps: int = 3) -> list[StepReport]:
    loop = trainer(config)
    return [loop.train_step() for _ in range(steps)]


@pytest.fixture(scope="module")
def three_steps() -> list[StepReport]:
    """The first steps of a run with `CONFIG`."""
    return run()


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(three_steps: list[StepReport]) -> None:
    first = [report.losses for report in three_steps]
    assert first == [report.losses for report in run()]
    assert first[:1] != [report.losses for report in run(replace(CONFIG, seed=4), steps=1)]


def test_behaviour_logprobs_are_those_of_the_weights_that_generated() -> None:
    loop = trainer()
    for sample in (sample for group in loop.generate() for sample in group):
        with torch.no_grad():
            logprobs_T, _ = packed_logprobs(loop.actor.model, [sample], 1.0)
        generated_T = sample.loss_mask.astype(bool)
        np.testing.assert_allclose(logprobs_T.numpy()[generated_T], sample.behave_logprobs[generated_T], atol=1e-5)
        assert set(sample.versions[generated_T]) == {0}
        assert set(sample.versions[~generated_T]) == {-1}


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_chat_model_is_asked_through_its_template(evaluated: bool) -> None:
    loop, asked = trainer(), []
    loop.prompt_format = PromptFormat(
        TOKENIZER, ChatTemplate("{% for m in messages %}#{{ m.content }}+{% endfor %}", {})
    )
    answer = loop.answer
    loop.answer = lambda prompts, policies: asked.extend(prompts) or answer(prompts, policies)  # type: ignore[method-assign,func-returns-value]
    loop.greedy_accuracy(loop.dataset) if evaluated else loop.generate()
    for prompt in asked:
        assert list(prompt.input_ids) == TOKENIZER.encode(f"#{prompt.data['prompt']}+")
    assert len(asked) == (32 if evaluated else 4)


def test_without_staleness_the_behaviour_policy_is_the_proximal_one(three_steps: list[StepReport]) -> None:
    for report in three_steps:
        assert report.stats["ppo/behave_imp_weight_mean"] == pytest.approx(1.0, abs=1e-4)
        assert report.stats["ppo/behave_kl"] == pytest.approx(0.0, abs=1e-5)


def test_staleness_generates_with_the_weights_of_so_many_versions_ago() -> None:
    loop = trainer(replace(CONFIG, staleness=2))
    states = []
    for version in range(5):
        states.append(copy.deepcopy(loop.actor.model.state_dict()))
        loop.train_step()
        expected = states[max(0, version - 2)]
        assert all(torch.equal(tensor, expected[name]) for name, tensor in loop.actor.behaviour.state_dict().items())
        assert loop.actor.snapshots[0][0] == max(0, version - 2)
    assert not torch.equal(states[0]["model.norm.weight"], states[4]["model.norm.weight"])


def test_a_batch_of_equal_rewards_leaves_the_policy_as_it_is() -> None:
    loop = trainer(reward=lambda data, completion: 1.0)
    before = copy.deepcopy(loop.actor.model.state_dict())
    report = loop.train_step()
    assert report.losses == (0.0, 0.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loop.actor.model.state_dict().items())
    assert not loop.actor.optimizer.state


def test_minibatches_are_whole_groups_and_cover_the_batch_once() -> None:
    loop = trainer()
    sizes, seen = (2, 1, 5, 3), set()
    for loop.version in range(8):
        groups = [[item_of_reward(float(number % 2)) for number in range(size)] for size in sizes]
        whole = {tuple(map(id, group)): len(group) for group in groups}
        parts = [tuple(map(id, part)) for part in loop.actor.minibatches(groups, loop.version)]
        pairs = [next((a, b) for a in whole for b in whole if a != b and part == a + b) for part in parts]
        assert sorted(group for pair in pairs for group in pair) == sorted(whole)
        seen.add(tuple(tuple(whole[group] for group in pair) for pair in pairs))
    assert len(seen) > 1, "each version deals anew"


def test_each_minibatch_has_as_many_groups_with_a_signal() -> None:
    loop = trainer()
    for loop.version in range(8):
        groups = [[item_of_reward(reward) for reward in rewards] for rewards in ((0, 0), (1, 0), (1, 1), (0, 1))]
        parts = loop.actor.minibatches(groups, loop.version)
        assert [sum(item.sample.reward for item in part) for part in parts] in ([1, 3], [3, 1])


def item_of_reward(reward: float) -> TrainSample:
    tokens = np.zeros(1, np.int32)
    sample = Sample(tokens, np.zeros(1, np.uint8), np.zeros(1, np.float32), tokens - 1, reward)
    return TrainSample(0, sample, torch.zeros(1), torch.zeros(1))


def advantages(loop: ReferenceTrainer, group: Sequence[Sample]) -> list[torch.Tensor]:
    """Each sample's part of the group's packed advantages."""
    return list(loop.actor.advantages([group]).advantages_T.split([len(sample.tokens) for sample in group]))


def test_advantages_are_the_groups_normalised_rewards_on_generated_tokens() -> None:
    group = next(g for g in trainer().generate() if len({sample.reward for sample in g}) > 1)
    rewards = np.array([sample.reward for sample in group])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    estimated = advantages(trainer(), group)
    for sample, advantage, advantage_T in zip(group, expected, estimated, strict=True):
        np.testing.assert_allclose(advantage_T.numpy(), advantage * sample.loss_mask, atol=1e-5)


def test_the_first_minibatch_is_the_policy_gradient_in_plain_numbers() -> None:
    """With equal policies every ratio is 1, so the loss is minus the mean advantage over the minibatch's tokens."""
    loop = trainer()
    groups = trainer().generate()
    signal = [len({sample.reward for sample in group}) > 1 for group in groups]
    permuted = np.random.default_rng([CONFIG.seed, 0]).permutation(4).tolist()
    order = sorted(permuted, key=lambda g: not signal[g])[::2]
    tokens = [
        advantage
        for g in order
        if signal[g]
        for sample, advantage_T in zip(groups[g], advantages(loop, groups[g]), strict=True)
        for advantage in advantage_T[torch.from_numpy(sample.loss_mask).bool()].tolist()
    ]
    assert loop.train_step().losses[0] == pytest.approx(-np.mean(tokens), abs=1e-5)


def test_reinforcing_a_reward_raises_it() -> None:
    """Answers that begin with `#` are rewarded; a few steps make most of them do so."""
    config = replace(CONFIG, train_batch_size=8, group_size=8, lr=2e-2, sampling=SamplingParams(max_new_tokens=2))
    loop = trainer(config, reward=lambda data, completion: float(completion.startswith("#")))
    rewards = [loop.train_step().reward_mean for _ in range(15)]
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.8


def test_an_evaluation_between_steps_does_not_change_the_run(three_steps: list[StepReport]) -> None:
    held_out = ArithmeticDataset(split="held_out", num_rows=8, max_numbers=3)
    loop, losses = trainer(), []
    for _ in range(3):
        loop.greedy_accuracy(held_out)
        losses.append(loop.train_step().losses)
    assert losses == [report.losses for report in three_steps]
