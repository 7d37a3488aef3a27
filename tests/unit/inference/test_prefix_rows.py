"""Each slot gets the keys that its prefix has alone, and what prefixes have in common is computed once."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from asyncrl.inference.embedded.attention import Reach, after_base_bias
from asyncrl.inference.embedded.cache import MOST_MASKED_PAIRS, Prefix, PrefixRow, RowTensors, batches_of
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.embedded.prefix_cache import WORTH_A_FORWARD, common_length
from asyncrl.inference.embedded.step import ModelRunner, PrefixForward
from asyncrl.inference.engine_io import GenerationInput, GenerationOutput, SamplingSpec
from asyncrl.inference.messages import PauseMode
from tests.examples import examples

CPU = torch.device("cpu")

prefixes = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


@given(st.lists(prefixes, min_size=1, max_size=9, unique=True), st.integers(1, 60), st.booleans(), st.integers(0, 99))
def test_every_prefix_goes_to_its_slots_behind_its_base(
    found: list[Prefix], most: int, ragged: bool, seed: int
) -> None:
    draw = Random(seed)
    rows = [PrefixRow(prefix, draw.choice((0, draw.randrange(len(prefix))))) for prefix in found]
    batches = batches_of(rows, most, ragged=ragged)
    assert sorted(rows) == sorted(row for batch in batches for row in batch)
    slots = {prefix: [3 * number, 3 * number + 1] for number, prefix in enumerate(found)}
    filled: dict[int, Prefix] = {}
    for batch in batches:
        width = max(row.size for row in batch)
        assert len(batch) == 1 or len(batch) * width <= most
        assert ragged or len({row.size for row in batch}) == 1
        assert len({row.base > 0 for row in batch}) == 1
        made = RowTensors.of(batch, slots, CPU)
        assert made.bases_B.tolist() == [row.base for row in batch]
        assert made.before == max(row.base for row in batch)
        assert made.sources_B.tolist() == [slots[row.prefix][0] for row in batch]
        to = made
        for slot, number in zip(to.slots_N.tolist(), to.rows_N.tolist(), strict=True):
            row = batch[number]
            own = to.slots_M == slot
            assert to.positions_M[own].tolist() == list(range(row.base, len(row.prefix)))
            assert set(to.rows_M[own].tolist()) == {number}
            places = to.indices_M[own]
            filled[slot] = (*row.prefix[: row.base], *made.tokens_BU[number, places].tolist())
            assert made.depths_BU[number, places].tolist() == list(range(row.base, len(row.prefix)))
    assert filled == {slot: prefix for prefix, own in slots.items() for slot in own}


def test_no_mask_of_rows_with_a_base_outgrows_its_bound() -> None:
    long = tuple(range(int(MOST_MASKED_PAIRS**0.5)))
    rows = [PrefixRow((*long, *[each] * 600), len(long)) for each in range(8)]
    batches = batches_of(rows, 10**6, ragged=True)
    assert [len(batch) for batch in batches] == [5, 3]
    assert batches_of([PrefixRow(row.prefix) for row in rows], 10**6, ragged=True) == [
        [PrefixRow(row.prefix) for row in rows]
    ]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=4), st.sampled_from([None, 1, 3]))
def test_a_token_sees_its_base_and_what_is_before_it(shapes: list[tuple[int, int]], window: int | None) -> None:
    rows = [PrefixRow(tuple(range(base + size)), base) for base, size in shapes]
    made = RowTensors.of(rows, {row.prefix: [0] for row in rows}, CPU)
    reach = None if window is None else Reach(window)
    bias = after_base_bias(made.bases_B, made.before, made.depths_BU, reach, torch.zeros(0))
    for number, row in enumerate(rows):
        for place in range(row.size):
            depth = row.base + place
            sees = bias[number, 0, place] == 0.0
            seen = [key for key in range(made.before) if sees[key]]
            seen += [row.base + key - made.before for key in range(made.before, len(sees)) if sees[key]]
            assert seen == [key for key in range(depth + 1) if window is None or depth - key < window]


def build(kind: str, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
        pad_token_id=0,
        **settings,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.eval()


MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 3},
    "gemma2": {"sliding_window": 3, "attn_logit_softcapping": 2.0, **MIXED},
    "gpt_oss": {"sliding_window": 3, "num_local_experts": 4, "num_experts_per_tok": 2, **MIXED},
}


@pytest.mark.parametrize("kind", MODELS)
def test_slots_hold_the_keys_and_values_that_each_prefix_has_alone(kind: str) -> None:
    runner = ModelRunner(build(kind, **MODELS[kind]), 4096)
    forward = PrefixForward(runner)
    forward.most_tokens = 40

    def filled(found: list[Prefix], bases: dict[Prefix, int] | None = None) -> list[list[torch.Tensor]]:
        slots: dict[Prefix, list[int]] = {}
        for number, prefix in enumerate(found):
            slots.setdefault(prefix, []).append(number)
        runner.cache = runner.make_cache(4096)
        runner.cache.reserve(len(found), max(map(len, found)) + 1, 0, 0)
        begun: dict[Prefix, list[int]] = {}
        for prefix, own in slots.items():
            if bases and bases[prefix]:
                begun.setdefault(prefix[: bases[prefix]], []).extend(own)
        with torch.inference_mode():
            forward.compute(begun)
            before = forward.computed_tokens
            forward.compute(slots, bases)
        known = 0 if bases is None else sum(bases[prefix] for prefix in slots)
        assert forward.computed_tokens - before == sum(map(len, slots)) - known
        held = [tensor for layer in runner.cache.layers for tensor in (layer.keys, layer.values)]
        return [[tensor[row, :, : len(each)] for tensor in held] for row, each in enumerate(found)]  # type: ignore[index]

    def alone(prefix: Prefix) -> list[torch.Tensor]:
        return filled([prefix])[0]

    @given(st.lists(prefixes, min_size=1, max_size=9), st.integers(0, 99))
    @settings(max_examples=examples(25), deadline=None)
    def check(found: list[Prefix], seed: int) -> None:
        draw = Random(seed)
        bases = {prefix: draw.randrange(len(prefix)) for prefix in found}
        expected = [alone(prefix) for prefix in found]
        for held in (filled(found), filled(found, bases)):
            for mine, its in zip(held, expected, strict=True):
                for a, b in zip(mine, its, strict=True):
                    torch.testing.assert_close(a, b, rtol=0.0, atol=2e-6)

    check()


LENGTH = 14
SURE = build("qwen2")
SURE.lm_head.weight.data *= 4.0  # type: ignore[union-attr,operator]


def engine_of(*, keeps: bool = True, **limits: int) -> GenerationEngine:
    """An engine of a model so sure of itself that samples of a group part late, and at several depths."""
    engine = GenerationEngine(SURE, **limits)
    if not keeps:
        engine._batch.prefills.kept = None
    return engine


def groups(draw: Random) -> list[GenerationInput]:
    prompts = [tuple(draw.randrange(20) for _ in range(draw.randint(1, 5))) for _ in range(2)]
    return [
        GenerationInput(f"s{i}", prompts[i // 4 % 2], SamplingSpec(max_new_tokens=draw.randint(1, LENGTH), seed=i))
        for i in range(12)
    ]


def answered(engine: GenerationEngine, inputs: list[GenerationInput], interrupt: Random | None, mode: PauseMode) -> Any:
    """Each input's tokens and log-probabilities, asked again with what it has wherever it was interrupted."""
    found: dict[str, tuple[list[int], list[float]]] = {each.rid: ([], []) for each in inputs}
    waiting = list(inputs)
    while waiting:
        future, first = engine.submit(Job(tuple(waiting))), 0 if interrupt is None else interrupt.randint(0, 5)
        while engine.step():
            first -= 1
            if interrupt is not None and first == 0:
                engine.pause(mode)
                engine.step()
                engine._batch.weights_changed()  # nothing that was cached may be used again
                engine.resume()
                first = interrupt.randint(1, 9)
        asked, waiting = waiting, []
        for each, output in zip(asked, future.result(timeout=0), strict=True):
            tokens, logprobs = found[each.rid]
            tokens += output.output_ids
            logprobs += output.logprobs
            left = each.sampling.max_new_tokens - len(output.output_ids)
            if left:
                offset = each.sampling.seed_offset + len(output.output_ids)
                spec = replace(each.sampling, max_new_tokens=left, seed_offset=offset)
                waiting.append(GenerationInput(each.rid, (*each.input_ids, *output.output_ids), spec))
    return found


@pytest.mark.parametrize("mode", [PauseMode.abort, PauseMode.retract])
def test_interrupted_groups_get_the_tokens_that_they_get_undisturbed(mode: PauseMode) -> None:
    engines = [engine_of(), engine_of(max_running_requests=5)]
    plain = engine_of(keeps=False)

    @given(st.integers(0, 10**6), st.sampled_from(engines))
    @settings(max_examples=12, deadline=None)
    def check(seed: int, engine: GenerationEngine) -> None:
        inputs = groups(Random(seed))
        expected = answered(plain, inputs, None, mode)
        found = answered(engine, inputs, Random(seed), mode)
        assert {rid: tokens for rid, (tokens, _) in found.items()} == {rid: its for rid, (its, _) in expected.items()}
        for rid, (_, logprobs) in found.items():
            assert logprobs == pytest.approx(expected[rid][1], abs=1e-4)

    check()


@pytest.mark.parametrize("samples", [3, 8])
def test_after_an_interruption_prefixes_continue_from_the_first_if_that_saves_a_forward(samples: int) -> None:
    prompt = (3, 1, 4, 1, 5, 9, 2, 6, 5)
    inputs = tuple(GenerationInput(f"s{i}", prompt, SamplingSpec(max_new_tokens=30, seed=i)) for i in range(samples))
    engine = engine_of()
    before = engine._batch.prefills.forward.computed_tokens
    future = engine.submit(Job(inputs))
    for _ in range(12):
        engine.step()
    assert engine._batch.prefills.forward.computed_tokens - before == len(prompt) - 1
    engine.pause(PauseMode.abort)
    engine.step()
    outputs: list[GenerationOutput] = future.result(timeout=0)
    engine.resume()
    again = [(*prompt, *output.output_ids) for output in outputs]
    engine._batch.weights_changed()  # what was cached is gone
    before = engine._batch.prefills.forward.computed_tokens
    later = engine.submit(Job(tuple(replace(each, input_ids=ids) for each, ids in zip(inputs, again, strict=True))))
    engine.step()
    first, *others = sorted({ids[:-1] for ids in again})
    assert others, "they have parted"
    common = sum(common_length(first, prefix) for prefix in others)
    assert (common >= WORTH_A_FORWARD) == (samples == 8), "both cases are tried"
    wanted = len(first) + sum(map(len, others)) - (common if common >= WORTH_A_FORWARD else 0)
    assert engine._batch.prefills.forward.computed_tokens - before == wanted
    engine.abort(abort_all=True)
    engine.step()
    cached = sum(output.cached_tokens for output in later.result(timeout=0))
    assert cached == sum(len(ids) - 1 for ids in again) - wanted


def test_one_common_token_of_many_prompts_is_worth_a_forward_too() -> None:
    prompts = [(1, a, b, 2) for a in range(9) for b in range(9)]
    engine = engine_of(max_running_requests=len(prompts))
    before = engine._batch.prefills.forward.computed_tokens
    engine.submit(
        Job(tuple(GenerationInput(str(i), ids, SamplingSpec(max_new_tokens=1)) for i, ids in enumerate(prompts)))
    )
    engine.step()
    first, *others = [ids[:-1] for ids in prompts]
    wanted = len(first) + sum(len(prefix) - common_length(first, prefix) for prefix in others)
    assert engine._batch.prefills.forward.computed_tokens - before == wanted
