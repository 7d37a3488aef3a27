"""Prefixes that begin alike are prefilled as one row, and each slot gets the keys that its prefix has alone."""

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

from asyncrl.inference.embedded.decoding.prefix_rows import MOST_SHARED_TOKENS, Prefix, RowTensors, batches_of, rows_of
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.engine_io import GenerationInput, GenerationOutput, Job, SamplingSpec
from asyncrl.inference.embedded.model.masks import Reach, tree_bias
from asyncrl.inference.embedded.model.model_io import ModelRunner
from asyncrl.inference.embedded.model.prefix_forward import PrefixForward
from asyncrl.inference.messages import PauseMode
from tests.examples import examples

CPU = torch.device("cpu")
TOGETHER = 10**9
"""Pairs of a query and a key that a token's other work is worth, so that all that begins alike joins."""

prefixes = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)
tries = st.lists(prefixes, min_size=1, max_size=9, unique=True)


def distinct(prefixes: list[Prefix]) -> int:
    return len({prefix[:length] for prefix in prefixes for length in range(1, len(prefix) + 1)})


@given(tries, st.sampled_from([None, 0, 40, TOGETHER]), st.integers(1, 60), st.booleans())
def test_every_prefix_is_a_path_that_sees_itself_alone(
    found: list[Prefix], pairs: int | None, most: int, ragged: bool
) -> None:
    rows = rows_of(found, pairs)
    assert sorted(prefix for row in rows for prefix in row.prefixes) == sorted(found)
    assert all(row.size == distinct(row.prefixes) for row in rows), "what a row's prefixes share is there once"
    assert pairs is not None or len(rows) == len(found)
    assert pairs != TOGETHER or sum(row.size for row in rows) == distinct(found)
    batches = batches_of(rows, most, ragged=ragged)
    assert ragged or all(len({row.size for row in batch}) == 1 for batch in batches)
    assert sorted(map(id, rows)) == sorted(id(row) for batch in batches for row in batch)
    slots = {prefix: [3 * number, 3 * number + 1] for number, prefix in enumerate(found)}
    filled: dict[int, Prefix] = {}
    for batch in batches:
        width = max(row.size for row in batch)
        assert len(batch) == 1 or len(batch) * width <= most
        made = RowTensors.of(batch, slots, CPU)
        assert (made.ends_BU is None) == all(len(row.prefixes) == 1 for row in batch)
        sees = torch.ones(width, width).tril().bool().expand(len(batch), -1, -1)
        if made.ends_BU is not None:
            sees = tree_bias(made.ends_BU, made.depths_BU, None, torch.zeros(0))[:, 0] == 0.0
            assert sees.any(-1).all(), "a token that sees nothing is not a number"
            for window in (1, 3):
                bias = tree_bias(made.ends_BU, made.depths_BU, Reach(window), torch.zeros(0))[:, 0] == 0.0
                age = made.depths_BU[:, :, None] - made.depths_BU[:, None, :]
                assert torch.equal(bias, sees & (age < window))
        to = made.targets
        for slot, row in zip(to.slots_N.tolist(), to.rows_N.tolist(), strict=True):
            prefix = found[slot // 3]
            own = to.slots_M == slot
            assert to.positions_M[own].tolist() == list(range(len(prefix)))
            assert set(to.rows_M[own].tolist()) == {row}
            path = to.places_M[own]
            filled[slot] = tuple(made.tokens_BU[row, path].tolist())
            assert made.depths_BU[row, path].tolist() == list(range(len(prefix)))
            for length, place in enumerate(path.tolist(), 1):
                assert sees[row, place].nonzero()[:, 0].tolist() == path[:length].tolist()
    assert filled == {slot: prefix for prefix, own in slots.items() for slot in own}


def test_what_shares_a_first_token_only_stays_apart_and_no_mask_outgrows_its_bound() -> None:
    random = Random(0)
    alike = [(7, *(random.randrange(1000) for _ in range(60))) for _ in range(8)]
    assert len(rows_of(alike, 600)) == 8
    prompt = tuple(range(40))
    assert len(rows_of([(*prompt, *each[1:20]) for each in alike], 600)) == 1
    long = tuple(range(MOST_SHARED_TOKENS - 100))
    rows = rows_of([(*long, *each) for each in alike], TOGETHER)
    assert len(rows) == 8
    assert all(row.size <= MOST_SHARED_TOKENS or not row.branching for row in rows)


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

    def filled(
        found: list[Prefix], pairs: int | None, bases: dict[Prefix, int] | None = None
    ) -> list[list[torch.Tensor]]:
        slots: dict[Prefix, list[int]] = {}
        for number, prefix in enumerate(found):
            slots.setdefault(prefix, []).append(number)
        runner.cache, forward.pairs_per_token = runner.caches.make(4096), pairs
        runner.cache.reserve(len(found), max(map(len, found)) + 1, 0, 0)
        begun: dict[Prefix, list[int]] = {}
        for prefix, own in slots.items():
            if bases and bases[prefix]:
                begun.setdefault(prefix[: bases[prefix]], []).extend(own)
        with torch.inference_mode():
            forward.compute(begun)
            before = forward.computed_tokens
            shared = forward.compute(slots, bases)
        known = 0 if bases is None else sum(bases[prefix] for prefix in slots)
        assert forward.computed_tokens - before == sum(map(len, slots)) - sum(shared.values()) - known
        held = [tensor for layer in runner.cache.layers for tensor in (layer.keys, layer.values)]
        return [[tensor[row, :, : len(each)] for tensor in held] for row, each in enumerate(found)]  # type: ignore[index]

    @given(st.lists(prefixes, min_size=1, max_size=9), st.sampled_from([None, TOGETHER]), st.integers(0, 99))
    @settings(max_examples=examples(25), deadline=None)
    def check(found: list[Prefix], pairs: int | None, seed: int) -> None:
        draw = Random(seed)
        bases = {prefix: draw.randrange(len(prefix)) for prefix in found}
        whole = filled(found, None)
        for held in (filled(found, TOGETHER), filled(found, pairs, bases)):
            for mine, its in zip(held, whole, strict=True):
                for a, b in zip(mine, its, strict=True):
                    torch.testing.assert_close(a, b, rtol=0.0, atol=2e-6)

    check()


LENGTH = 14
SURE = build("qwen2")
SURE.lm_head.weight.data *= 4.0  # type: ignore[union-attr,operator]


def engine_of(pairs: int | None, **limits: int) -> GenerationEngine:
    """An engine of a model so sure of itself that samples of a group part late, and at several depths."""
    engine = GenerationEngine(SURE, **limits)
    engine._batch.prefills.forward.pairs_per_token = pairs
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
    engines = [engine_of(pairs, **limits) for pairs in (TOGETHER, 96) for limits in ({}, {"max_running_requests": 5})]
    plain = engine_of(None)

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


def test_after_an_interruption_every_distinct_prefix_is_prefilled_once() -> None:
    prompt = (3, 1, 4, 1, 5, 9, 2, 6, 5)
    inputs = tuple(GenerationInput(f"s{i}", prompt, SamplingSpec(max_new_tokens=30, seed=i)) for i in range(8))
    engine = engine_of(TOGETHER)
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
    assert len({len(output.output_ids) for output in outputs}) == 1
    assert len(set(again)) > 3, "they have parted"
    engine._batch.weights_changed()  # what was cached is gone
    before = engine._batch.prefills.forward.computed_tokens
    later = engine.submit(Job(tuple(replace(each, input_ids=ids) for each, ids in zip(inputs, again, strict=True))))
    engine.step()
    wanted = distinct([ids[:-1] for ids in again])
    assert (
        engine._batch.prefills.forward.computed_tokens - before
        == wanted
        < 0.8 * sum(len(ids) - 1 for ids in set(again))
    )
    engine.abort(abort_all=True)
    engine.step()
    cached = sum(output.cached_tokens for output in later.result(timeout=0))
    assert cached == sum(len(ids) - 1 for ids in again) - wanted
