"""Conversations in the embedded engine: what is kept of earlier turns and of other rollouts changes no token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.embedded.prefix_cache import WORTH_A_FORWARD
from asyncrl.inference.engine_io import GenerationInput, GenerationOutput, SamplingSpec
from asyncrl.inference.messages import PauseMode
from tests.engine_steps import drain, run

VOCABULARY, CONTEXT, SYSTEM = 40, 400, WORTH_A_FORWARD + 9
Tokens = tuple[int, ...]
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "gemma2": {
        "sliding_window": 7,
        "attn_logit_softcapping": 2.0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_5_text": DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
}
CLOSE = 1e-4
"""Nats, fp32; rows of another position or sample differ by 0.01 to 1."""


@cache
def model_of(kind: str, seed: int = 0) -> PreTrainedModel:
    """Never changed: engines get copies."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**COMMON, **MODELS[kind]}))
    return model.eval()


def engine_of(kind: str, *, keeps: bool = True, **limits: int) -> GenerationEngine:
    engine = GenerationEngine(copy.deepcopy(model_of(kind)), max_model_len=CONTEXT, **limits)
    assert engine._batch.prefills.kept is not None
    if not keeps:
        engine._batch.prefills.kept = None
    return engine


def assert_counted(engine: GenerationEngine) -> None:
    """What is kept is what the tree has, within the room that the slots leave."""
    kept, slots = engine._batch.prefills.kept, engine._batch.runner.cache
    assert kept is not None
    below, tokens, states = list(kept._roots.values()), 0, 0
    while below:
        node = below.pop()
        below += node.children.values()
        tokens += len(node.tokens)
        states += node.states is not None
        assert all(rows.shape[-2] == len(node.tokens) for rows in node.rows)
    assert (kept.tokens, kept.states) == (tokens, states)
    assert kept.tokens + slots.layout.tokens <= engine._batch.prefills._capacity


def draw_tokens(draw: Random, count: int) -> Tokens:
    return tuple(draw.randrange(2, VOCABULARY) for _ in range(count))


class Agents:
    """Conversations that one engine serves, drawn from `seed` alone: turns, forks of turns, agents that begin alike.

    Two of the same seed do the same to their engines, step by step.
    """

    def __init__(self, engine: GenerationEngine, seed: int) -> None:
        self.engine, self.draw, self.calls = engine, Random(seed), 0
        self.histories: list[Tokens] = [()]
        system = draw_tokens(self.draw, SYSTEM)
        self.begins = (system, system[: SYSTEM - 5], draw_tokens(self.draw, 4))
        self.open: list[tuple[Tokens, Any]] = []
        self.outputs: list[GenerationOutput] = []

    def ask(self) -> None:
        """A request that begins a conversation, or goes on with one or a group of its forks."""
        history = self.draw.choice(self.histories)
        prompt = (*(history or self.draw.choice(self.begins)), *draw_tokens(self.draw, self.draw.randint(1, 9)))
        if len(prompt) + 20 > CONTEXT // 2:
            return
        count = self.draw.choice((1, 1, 1, 3))
        temperature = self.draw.choice((0.0, 1.0))
        inputs = []
        for _ in range(count):
            self.calls += 1
            spec = SamplingSpec(self.draw.randint(1, 14), temperature=temperature, seed=self.calls)
            inputs.append(GenerationInput(f"c{self.calls}", prompt, spec))
        self.open.append((prompt, self.engine.submit(Job(tuple(inputs)))))

    def step(self) -> None:
        """Whatever happens next."""
        chance = self.draw.random()
        if chance < 0.2:
            self.ask()
        elif chance < 0.23:
            self.engine.abort(f"c{self.draw.randint(1, max(1, self.calls))}")
        elif chance < 0.26:
            self.engine.pause(PauseMode.retract)
            self.engine.step()
            if self.draw.random() < 0.5:
                self.change_weights(0.9)
            self.engine.resume()
        elif chance < 0.28:  # weights that are the same, so that rows that were kept are what a prefill makes
            self.engine.pause(PauseMode.in_place)
            self.engine.step()
            self.engine._batch.weights_changed(keep_cache=True)
            self.engine.resume()
        self.engine.step()
        for prompt, future in self.open:
            if future.done():
                self.outputs += future.result(timeout=0)
                self.histories += [(*prompt, *each.output_ids) for each in future.result(timeout=0)]
        self.open = [each for each in self.open if not each[1].done()]
        self.histories = self.histories[:1] + self.histories[-4:]

    def change_weights(self, factor: float) -> None:
        for parameter in self.engine.model.parameters():
            parameter.data *= factor
        self.engine._batch.weights_changed()

    def finish(self) -> list[GenerationOutput]:
        while self.open:
            drain(self.engine)
            self.outputs += [output for _, future in self.open for output in future.result(timeout=0)]
            self.open.clear()
        return self.outputs


CAPACITIES: dict[str, dict[str, int]] = {
    "wide": {"max_running_requests": 8},
    "few rows": {"max_running_requests": 3},
    "tiny": {"max_running_requests": 8, "max_total_tokens": 420},
}


@pytest.mark.parametrize(
    ("kind", "capacity"), [(kind, "tiny") for kind in MODELS] + [("qwen2", capacity) for capacity in CAPACITIES][:2]
)
def test_any_schedule_of_conversations_gives_the_tokens_that_it_gives_where_nothing_is_kept(
    kind: str, capacity: str
) -> None:
    mine, its = (Agents(engine_of(kind, keeps=keeps, **CAPACITIES[capacity]), 1) for keeps in (True, False))
    for _ in range(90):
        mine.step()
        its.step()
        assert_counted(mine.engine)
    found, expected = mine.finish(), its.finish()
    assert [output.rid for output in found] == [output.rid for output in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.output_ids == other.output_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=CLOSE)
    known = its.engine.stats().prefilled_tokens - mine.engine.stats().prefilled_tokens
    assert known > 0, "and something was kept"
    mine.engine._batch.prefills.forget()
    assert_counted(mine.engine)
    assert mine.engine._batch.prefills.kept_tokens == 0


@pytest.mark.parametrize("kind", MODELS)
def test_an_agent_of_many_turns_prefills_its_new_tokens_alone(kind: str) -> None:
    engine, plain, draw = engine_of(kind), engine_of(kind, keeps=False), Random(1)
    history: Tokens = draw_tokens(draw, 20)
    for turn in range(8):
        asked = GenerationInput(f"t{turn}", history, SamplingSpec(max_new_tokens=10, temperature=0.0))
        (output,), (expected,) = run(engine, asked), run(plain, asked)
        assert output.output_ids == expected.output_ids
        assert output.logprobs == pytest.approx(expected.logprobs, abs=CLOSE)
        assert output.cached_tokens == (0 if turn == 0 else len(history) - 1 - (1 + 14 - 1))
        history = (*history, *output.output_ids, *draw_tokens(draw, 14))
    assert engine.stats().prefilled_tokens == 19 + 7 * (1 + 14 - 1)
    assert plain.stats().prefilled_tokens == sum(19 + turn * 24 for turn in range(8))
    assert engine.stats().cached_tokens == plain.stats().prefilled_tokens - engine.stats().prefilled_tokens


@pytest.mark.parametrize("together", [True, False])
def test_what_rollouts_begin_with_is_prefilled_once_for_a_version(together: bool) -> None:
    engine, draw = engine_of("qwen2", max_running_requests=4), Random(2)
    system = draw_tokens(draw, SYSTEM)
    inputs = [
        GenerationInput(f"s{i}", (*system, i + 2, *draw_tokens(draw, 5)), SamplingSpec(6, seed=i)) for i in range(8)
    ]
    if together:
        run(engine, *inputs)
    else:
        for each in inputs:
            run(engine, each)
    assert engine.stats().prefilled_tokens == SYSTEM + 8 * 5
    engine._batch.weights_changed()
    run(engine, *inputs)
    assert engine.stats().prefilled_tokens == 2 * (SYSTEM + 8 * 5)


def test_kept_rows_give_way_before_a_sample_waits_and_come_back_to_use() -> None:
    engine, draw = engine_of("qwen2", max_running_requests=4, max_total_tokens=400), Random(3)
    kept = engine._batch.prefills.kept
    assert kept is not None
    first = GenerationInput("a", draw_tokens(draw, 60), SamplingSpec(10, seed=1))
    (answer,) = run(engine, first)
    assert engine.stats().kept_tokens == 69
    run(engine, *(GenerationInput(f"b{i}", draw_tokens(draw, 80), SamplingSpec(20, seed=i)) for i in range(4)))
    assert engine._batch.runner.cache.layout.tokens == 400, "all room was needed"
    assert kept.evicted >= 69
    again = GenerationInput("c", (*first.input_ids, *answer.output_ids, 5, 6), SamplingSpec(10, seed=1))
    (output,) = run(engine, again)
    assert output.cached_tokens == 0
    (later,) = run(engine, GenerationInput("d", (*again.input_ids, *output.output_ids, 7), SamplingSpec(4, seed=1)))
    assert later.cached_tokens > 60, "the slots have given back what they did not need"


@torch.no_grad()
def under_both(old: PreTrainedModel, new: PreTrainedModel, ids: list[int], change: int) -> Tensor:
    """Log-probabilities of `ids[change + 1:]` by `new`, from what `old` left of `ids[:change]`."""
    state = DynamicCache(config=old.config)
    if change:
        old(input_ids=torch.tensor([ids[:change]]), cache=state, use_cache=True)
    logits = new(input_ids=torch.tensor([ids[change:]]), cache=state, use_cache=True).logits[0].float()
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[change + 1 :])[:, None])[:, 0]


@pytest.fixture
def newer(tmp_path: Path) -> Callable[[str], Path]:
    def save(kind: str) -> Path:
        model_of(kind, seed=4).save_pretrained(str(tmp_path / "newer"))
        return tmp_path / "newer"

    return save


@pytest.mark.parametrize("in_place", [True, False])
def test_an_update_forgets_but_in_place_a_conversation_goes_on(in_place: bool, newer: Callable[[str], Path]) -> None:
    engine, draw = engine_of("qwen2"), Random(5)
    system = draw_tokens(draw, 30)
    (first,) = run(engine, GenerationInput("a", (*system, 3), SamplingSpec(10, seed=1)))
    running = engine.submit(Job((GenerationInput("r", (*system, 4), SamplingSpec(12, seed=2)),)))
    for _ in range(5):
        engine.step()
    engine.pause(PauseMode.in_place if in_place else PauseMode.retract)
    engine.step()
    engine.update_weights(str(newer("qwen2")), "v1", flush_cache=not in_place)
    engine.step()
    engine.resume()
    drain(engine)
    (crossed,) = running.result(timeout=0)
    old, new = model_of("qwen2"), model_of("qwen2", seed=4)
    for last, output in ((3, first), (4, crossed)):
        history = [*system, last, *output.output_ids]
        turn = GenerationInput(f"b{last}", (*history, 6, 7), SamplingSpec(8, seed=3))
        (later,) = run(engine, turn)
        assert later.cached_tokens == (len(history) - 1 if in_place or output is crossed else len(system))
        change = 0 if not in_place else len(history) - 1 if output is first else len(system) + 5
        expected = under_both(old, new, [*turn.input_ids, *later.output_ids], change)
        assert later.logprobs == pytest.approx(expected[-8:].tolist(), abs=CLOSE)
    other = GenerationInput("c", (*system, 9), SamplingSpec(8, seed=3))
    (fresh,) = run(engine, other)
    expected = under_both(old, new, [*other.input_ids, *fresh.output_ids], 0)
    assert fresh.logprobs == pytest.approx(expected[-8:].tolist(), abs=CLOSE), "another rollout has none of old weights"


@pytest.mark.parametrize("part", [12, 512])
def test_experts_of_what_was_kept_are_told_again(part: int) -> None:
    torch.manual_seed(2)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3_moe"](**COMMON, **sizes)).eval()
    engine, plain = (
        GenerationEngine(copy.deepcopy(model), record_routing=True, chunked_prefill_size=part) for _ in range(2)
    )
    plain._batch.prefills.kept = None
    draw = Random(9)
    history = draw_tokens(draw, 40)
    for turn in range(3):
        asked = GenerationInput(f"t{turn}", history, SamplingSpec(6, seed=turn), routing_from=0)
        (output,), (expected,) = run(engine, asked), run(plain, asked)
        assert output.output_ids == expected.output_ids
        assert output.routing is not None
        assert expected.routing is not None
        assert output.routing.tolist() == expected.routing.tolist()
        history = (*history, *output.output_ids, *draw_tokens(draw, 20))
    assert engine.stats().prefilled_tokens < plain.stats().prefilled_tokens


# Long prompts, in parts.


def long_requests(draw: Random) -> list[tuple[int, GenerationInput]]:
    """Requests by the step at which they arrive: short and long ones, some that begin alike, one group."""
    system = draw_tokens(draw, 50)
    prompts = [
        (*(system if draw.random() < 0.4 else ()), *draw_tokens(draw, draw.choice((3, 30, 90)))) for _ in range(9)
    ]
    prompts += [draw_tokens(draw, 70)] * 3
    inputs = [
        GenerationInput(f"l{i}", prompt, SamplingSpec(draw.randint(1, 25), temperature=float(i % 3 > 0), seed=i))
        for i, prompt in enumerate(prompts)
    ]
    return sorted(((draw.randrange(25), each) for each in inputs), key=lambda pair: pair[0])


@pytest.mark.parametrize("capacity", ["few rows", "tiny"])
@pytest.mark.parametrize("kind", MODELS)
def test_prompts_in_parts_give_the_tokens_that_they_give_whole(kind: str, capacity: str) -> None:
    draw = Random(len(kind))
    requests = long_requests(draw)
    plain = engine_of(kind, keeps=False)
    expected = {output.rid: output for output in run(plain, *(each for _, each in requests))}
    engine = engine_of(kind, chunked_prefill_size=16, **CAPACITIES[capacity])
    futures, step, held = [], 0, 0
    while step < 40 or engine.step():
        futures += [engine.submit(Job((each,))) for at, each in requests if at == step]
        engine.step()
        held += len(engine._batch.long_prompts.held)
        assert_counted(engine)
        if draw.random() < 0.1:  # the weights stay what they are
            mode = draw.choice((PauseMode.retract, PauseMode.in_place))
            engine.pause(mode)
            engine.step()
            engine._batch.weights_changed(keep_cache=mode == PauseMode.in_place or draw.random() < 0.5)
            engine.resume()
        step += 1
    assert held > 20, "some were prefilled in parts"
    for future in futures:
        (output,) = future.result(timeout=0)
        assert output.output_ids == expected[output.rid].output_ids
        assert output.logprobs == pytest.approx(expected[output.rid].logprobs, abs=CLOSE)
    assert engine.stats().waiting == 0


def test_others_go_on_while_a_long_prompt_is_prefilled_and_its_parts_are_its_own() -> None:
    engine, draw = engine_of("qwen2", chunked_prefill_size=20), Random(7)
    short = engine.submit(Job((GenerationInput("short", (3, 4, 5), SamplingSpec(40, seed=1)),)))
    for _ in range(4):
        engine.step()
    before = engine.stats().prefilled_tokens
    prompt = draw_tokens(draw, 206)
    group = engine.submit(Job(tuple(GenerationInput(f"long{i}", prompt, SamplingSpec(5, seed=i)) for i in range(3))))
    generated = []
    while engine._batch.samples.live == 1:
        engine.step()
        generated.append(engine._batch.counts.generated)
    assert len(generated) >= 10, "205 tokens in parts of 20"
    assert all(later > earlier for earlier, later in pairwise(generated)), "every step a token"
    drain(engine)
    outputs = group.result(timeout=0)
    assert [output.cached_tokens for output in outputs] == [0, 205, 205]
    assert engine.stats().prefilled_tokens - before == 205
    (alone,) = run(engine_of("qwen2", keeps=False), GenerationInput("short", (3, 4, 5), SamplingSpec(40, seed=1)))
    assert short.result(timeout=0)[0].output_ids == alone.output_ids


@pytest.mark.parametrize("end", ["abort", "update", "no room"])
def test_a_prompt_in_parts_may_be_aborted_begin_again_or_lack_room(end: str, newer: Callable[[str], Path]) -> None:
    limits = {"max_total_tokens": 150, "max_running_requests": 1} if end == "no room" else {}
    engine, draw = engine_of("qwen2", chunked_prefill_size=20, **limits), Random(8)
    request = GenerationInput("long", draw_tokens(draw, 120), SamplingSpec(10, seed=1))
    future = engine.submit(Job((request,)))
    for _ in range(3):
        engine.step()
    assert engine._batch.prefills.kept_tokens == 60
    if end == "abort":
        engine.abort("long")
    if end == "update":
        engine.pause(PauseMode.retract)
        engine.step()
        assert engine.update_weights(str(newer("qwen2")), "v1").done() is False
        engine.step()
        engine.resume()
    drain(engine)
    (output,) = future.result(timeout=0)
    assert (output.finish is not None and output.finish.queued) == (end == "abort")
    if end != "abort":
        model = model_of("qwen2", seed=4 if end == "update" else 0)
        expected = under_both(model, model, [*request.input_ids, *output.output_ids], 0)
        assert output.logprobs == pytest.approx(expected[-10:].tolist(), abs=CLOSE)
        assert output.cached_tokens == 0
    assert_counted(engine)


def test_a_prompt_in_parts_is_not_computed_again_where_its_slot_takes_all_room() -> None:
    engine, draw = engine_of("qwen2", chunked_prefill_size=20, max_total_tokens=420, max_running_requests=4), Random(9)
    short = engine.submit(Job(tuple(GenerationInput(f"s{i}", (3 + i, 4), SamplingSpec(60, seed=i)) for i in range(2))))
    for _ in range(3):
        engine.step()
    before, most = engine._batch.prefills.forward.computed_tokens, 0
    future = engine.submit(Job((GenerationInput("long", draw_tokens(draw, 125), SamplingSpec(10, seed=1)),)))
    while engine.step():
        most = max(most, engine._batch.runner.cache.layout.tokens)
        assert_counted(engine)
    (output,) = future.result(timeout=0)
    assert most == 420, "three rows of 136"
    assert engine._batch.prefills.forward.computed_tokens - before == 124
    assert len(short.result(timeout=0)) == 2
    assert_counted(engine)
    model = model_of("qwen2")
    expected = under_both(model, model, [*draw_tokens(Random(9), 125), *output.output_ids], 0)
    assert output.logprobs == pytest.approx(expected[-10:].tolist(), abs=CLOSE)
