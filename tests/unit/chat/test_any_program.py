"""Whatever a program does with its conversations: every token that it received has loss once, where it was drawn, and
its episode weighs in the loss what docs/algorithms.md says.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.api import (
    ChatReply,
    Completion,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Prompt,
    Sample,
    SamplingParams,
    Trajectory,
)
from asyncrl.chat.conversation import ChatLimits
from asyncrl.chat.episode_client import ChatPolicy, ConversationEnded, EpisodeClient
from asyncrl.chat.settings import Reasoning
from asyncrl.chat.template import ChatFormat
from asyncrl.comm.trajectory_codec import decode_trajectories, encode_trajectories
from asyncrl.config.plugin_code.catalog import known
from asyncrl.config.setting import ChoiceConfig
from asyncrl.data.chat_template import ChatError
from asyncrl.models.ranks import Ranks
from asyncrl.plugins.agents.compaction import CompactionRules
from asyncrl.trainer.batches.micro_batch import micro_batches, wanted_lengths
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.engines.base import PolicyOutputs
from asyncrl.trainer.functions.actor import ActorLoss
from asyncrl.trainer.functions.model_functions import CallContext, TrainState
from asyncrl.trainer.settings import AlgorithmConfig
from tests.examples import examples

from .conftest import TEMPLATES, FakePolicy
from .test_client import TOOLS, Calls, ended, user

MakeFormat = Callable[..., ChatFormat]
Messages = list[Any]
Answer = tuple[str, tuple[int, ...], Completion]
"""Comparison group, context and answer."""
DIVISOR = 7.0


class Policy(FakePolicy):
    """Says any tokens, or none if it is `silent`."""

    silent = False

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        result = await super().generate(request)
        if not self.silent:
            return result
        return replace(result, completions=tuple(Completion([], [], [], FinishReason.stop) for _ in range(request.n)))


class Client(EpisodeClient):
    """Notes the answers that its program received; all clients of the episode share the list."""

    received: list[Answer]

    async def chat(self, *args: Any, **kwargs: Any) -> ChatReply:
        reply = await super().chat(*args, **kwargs)
        self.received += [(self._group, each.prompt_ids, each.completion) for each in (reply, *reply.alternatives)]
        return reply

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        result = await super().generate(request)
        self.received += [(self._group, request.input_ids, completion) for completion in result.completions]
        return result

    def forget(self, answer: Completion) -> None:
        super().forget(answer)
        self.received[:] = [each for each in self.received if each[2] is not answer]


@dataclass
class Conversation:
    """What a program knows of its conversations with one client: histories that it may go on from, and ids."""

    histories: list[Messages] = field(default_factory=lambda: [[]])
    asked: list[Messages] = field(default_factory=list)
    seen: list[tuple[int, ...]] = field(default_factory=list)


class Program:
    """Takes any steps, drawn from `data`; what a history says need not be what was said."""

    STEPS = ("go on",) * 4 + ("rewrite", "leave out", "cut", "repeat", "compact", "ids", "begun answer", "not received")

    def __init__(self, data: st.DataObject, chat: ChatFormat, prompt: Prompt) -> None:
        self.draw, self.chat = data.draw, chat
        self.policy = Policy(ended(chat), vocab=600)
        rules = ChatPolicy(ChatLimits(max_turns=4, max_context=400), reasoning=self.draw(st.sampled_from(Reasoning)))
        self.prompt = prompt
        self.client = Client(self.policy, prompt, chat, rules)
        self.client.received = []
        self.conversations = {name: Conversation() for name in ("", "judge", "judge/1")}

    async def play(self) -> None:
        for number in range(self.draw(st.integers(1, 6))):
            with contextlib.suppress(ConversationEnded, ChatError):  # a template refuses what no conversation is
                await self.step(number)

    async def step(self, number: int) -> None:
        name = self.draw(st.sampled_from(["", "", *self.conversations]))
        client = self.client.conversation(name) if name else self.client
        own, what = self.conversations[name], self.draw(st.sampled_from(self.STEPS))
        messages = [*self.draw(st.sampled_from(own.histories))]
        self.policy.cut, self.policy.silent = self.draw(st.booleans()), self.draw(st.sampled_from([0, 0, 0, 1])) == 1
        tools, n = TOOLS if self.draw(st.booleans()) else [], self.draw(st.integers(1, 2))
        if what == "ids" and own.seen:
            ids = (*self.draw(st.sampled_from(own.seen)), *self.draw(st.lists(st.integers(20, 500), max_size=2)))
            result = await client.generate(GenerationRequest(str(number), ids, n, SamplingParams()))
            own.seen += [(*ids, *each.token_ids) for each in result.completions]
            return
        if what == "repeat" and own.asked:
            messages = self.draw(st.sampled_from(own.asked))
        else:
            at = self.draw(st.integers(0, max(0, len(messages) - 1)))
            if messages and what == "rewrite":
                messages[at] = {**messages[at], "content": "other"}
            elif what in ("leave out", "cut"):
                del messages[at : at + 1 if what == "leave out" else None]
            calls = messages[-1].get("tool_calls", []) if messages else []
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in calls]
            messages += results if results and tools else [user(self.draw(st.sampled_from("ab")))]
        if what == "compact":
            rules = CompactionRules(at=0.2, summary_tokens=8, keep_turns=self.draw(st.integers(0, 2)))
            messages = await rules.begin(self.prompt, client, tools).shortened(messages)
        if what == "begun answer":
            messages = [*messages, {"role": "assistant", "content": "So"}]
        reply = await client.chat(messages, tools=tools, n=n, continue_last=what == "begun answer")
        replies = [reply, *reply.alternatives]
        if what == "not received":
            client.forget(replies.pop().completion)
        own.asked.append(messages)
        for each in replies:
            before = messages[:-1] if what == "begun answer" else messages
            own.histories.append([*before, each.message])
            own.seen.append((*each.prompt_ids, *each.completion.token_ids))


def token(group: str, before: Any, token_id: int, logprob: float, version: int) -> tuple[Any, ...]:
    """A token where it was drawn, with all that belongs to it."""
    return group, np.array(before, np.int32).tobytes(), int(token_id), float(np.float32(logprob)), int(version)


def received_tokens(answers: Sequence[Answer]) -> Counter[tuple[Any, ...]]:
    return Counter(
        token(group, (*ids, *answer.token_ids[:at]), answer.token_ids[at], answer.logprobs[at], answer.versions[at])
        for group, ids, answer in answers
        for at in range(len(answer.token_ids))
    )


def loss_tokens(samples: Sequence[Sample]) -> Counter[tuple[Any, ...]]:
    for sample in samples:
        without = sample.loss_mask == 0
        assert (sample.versions[without] == -1).all()
        assert (sample.behave_logprobs[without] == 0).all()
    return Counter(
        token(sample.group, sample.tokens[:at], sample.tokens[at], sample.behave_logprobs[at], sample.versions[at])
        for sample in samples
        for at in np.flatnonzero(sample.loss_mask)
    )


@cache
def documented_weights() -> dict[str, tuple[str, str]]:
    """The weight of an episode under each aggregation, and that of the example, as the page writes them."""
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    section = page.split("### What an episode weighs in the loss")[1].split("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", section, re.M)
    return {name: (formula.replace("·", "*"), example) for name, formula, example in rows}


def weights_by_page(name: str, episodes: Sequence[Sequence[int]], divisor: float = DIVISOR) -> list[float]:
    """The weights of `episodes` of one optimizer step; each is the numbers of tokens with loss of its samples."""
    lengths = [[length for length in episode if length] for episode in episodes]
    totals = {
        "N": sum(map(sum, lengths)),
        "M": sum(map(len, lengths)),
        "E": sum(1 for each in lengths if each),
        "divisor": divisor,
    }
    formula = documented_weights()[name][0]
    return [eval(formula, {}, totals | {"n_e": sum(each), "m_e": len(each)}) if each else 0.0 for each in lengths]


@dataclass(frozen=True)
class Summing(Ranks):
    """Ranks that run one after the other: each leaves its part, and reads the sum once all have."""

    parts: list[torch.Tensor] = field(default_factory=list)
    complete: bool = False

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.complete:
            return torch.stack(self.parts).sum(0)
        self.parts.append(tensor.clone())
        return tensor


def weights_by_loss(name: str, batches: Sequence[StepBatch], kind: AttentionKind, budget: int) -> list[torch.Tensor]:
    """a_t/D of each token of each rank's batch: the gradient of the actor's loss, summed over micro-batches."""
    params: dict[str, Any] = {"divisor": DIVISOR} if name == "constant" else {}
    algorithm = AlgorithmConfig(
        policy_loss=ChoiceConfig("reinforce"),
        correction=ChoiceConfig("none"),
        aggregation=ChoiceConfig(name, params),
    )
    config, state = cast(Any, SimpleNamespace(algorithm=algorithm)), TrainState(algorithm)
    ranks, weights = Summing(), list[torch.Tensor]()
    for complete in (False, True):
        ranks = replace(ranks, complete=complete)
        weights = []
        for batch in batches:
            loss = ActorLoss(CallContext("actor_train", "actor", (), (), {}, config, {}, ranks, state), batch)
            weight_T = torch.zeros(batch.num_tokens, dtype=torch.float64)
            wanted = loss.wanted_T.numpy()
            lengths = wanted_lengths(wanted, batch.starts_S, batch.lengths_S) if batch.num_seqs else batch.lengths_S
            for number, seqs in enumerate(batch.minibatches if complete else ()):
                for part in micro_batches(
                    *(batch["tokens"], wanted, batch.starts_S, lengths, seqs),
                    budget=budget,
                    kind=kind,
                    prefixes=batch.prefixes if kind.shares_prefixes else None,
                ):
                    logprobs_N = torch.zeros(len(part.targets_N), dtype=torch.float64, requires_grad=True)
                    share, _ = loss.share(part, PolicyOutputs(logprobs_N, torch.zeros_like(logprobs_N)), number=number)
                    weight_T[part.targets_N] -= torch.autograd.grad(share, logprobs_N)[0]
            weights.append(weight_T)
    return weights


def check_weights(data: st.DataObject, trajectories: Sequence[Trajectory]) -> None:
    """The weights of all episodes, however samples without a signal, minibatches, ranks and micro-batches fall."""
    kind = data.draw(st.sampled_from(["padded", "packed", "tree"]))
    budget = data.draw(st.sampled_from([1, 500, 10_000]))
    rank_of, minibatch_of = (data.draw(st.lists(st.integers(0, 1), min_size=9, max_size=9)) for _ in range(2))
    batches, episodes = [], []
    for rank in range(2):
        mine = [number for number in range(len(trajectories)) if rank_of[number] == rank]
        batch = build_step_batch(
            *([trajectories[number] for number in mine], [minibatch_of[number] for number in mine]),
            version=9,
            num_minibatches=2,
        )
        signal_S = torch.tensor(
            data.draw(st.lists(st.integers(0, 3), min_size=batch.num_seqs, max_size=batch.num_seqs)), dtype=torch.int64
        ).bool()
        batch["advantages"] = signal_S[batch.seq_ids_T].float()
        batches.append(batch)
        names = [
            (minibatch_of[number], trajectories[number].rollout_id, sample.episode)
            for number in mine
            for sample in trajectories[number].samples
        ]
        lengths = torch.bincount(batch.seq_ids_T[batch["loss_mask"]], minlength=batch.num_seqs) * signal_S
        episodes.append(list(zip(names, lengths.tolist(), strict=True)))
    by_episode: dict[tuple[int, str, int], list[int]] = {}
    for name, length in (each for of_rank in episodes for each in of_rank):
        by_episode.setdefault(name, []).append(length)
    for aggregation in known("aggregation"):
        expected: dict[tuple[int, str, int], float] = {}
        for number in range(2):
            own = {name: lengths for name, lengths in by_episode.items() if name[0] == number}
            expected |= dict(zip(own, weights_by_page(aggregation, list(own.values())), strict=True))
        found = dict.fromkeys(by_episode, 0.0)
        weights = weights_by_loss(aggregation, batches, AttentionKind(kind), budget)
        for batch, weight_T, names_S in zip(batches, weights, episodes, strict=True):
            for (name, _), own_T in zip(names_S, torch.split(weight_T, batch.lengths_S.tolist()), strict=True):
                found[name] += float(own_T.sum())
        assert found == pytest.approx(expected, rel=1e-9), aggregation


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_every_token_received_has_loss_once_and_an_episode_weighs_what_the_page_says(
    chat_format: MakeFormat, prompt: Prompt, data: st.DataObject
) -> None:
    chat = chat_format(data.draw(st.sampled_from(list(TEMPLATES))), Calls())
    rollouts = []
    for number in range(2):
        samples = []
        for episode in range(2):
            own = replace(prompt, prompt_id=f"p{number}", member=episode)
            program = Program(data, chat, own)
            asyncio.run(program.play())
            trained = program.client.samples(data.draw(st.integers(0, 1)))
            assert loss_tokens(trained) == received_tokens(program.client.received)
            samples += [replace(sample, episode=episode) for sample in trained]
        if samples:
            rollouts.append(Trajectory(f"r{number}", f"p{number}", number, samples))
    check_weights(data, decode_trajectories(encode_trajectories(rollouts)) if rollouts else [])


@pytest.mark.parametrize("name", known("aggregation"))
def test_the_pages_example_is_what_its_formulas_give(name: str) -> None:
    example = documented_weights()[name][1]
    assert weights_by_page(name, [[50, 100], [50]])[0] == pytest.approx(eval(example, {"divisor": DIVISOR}), abs=5e-3)
