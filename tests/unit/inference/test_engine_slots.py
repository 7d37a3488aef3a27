"""Samples with the same tokens share a row of the model, and each is what it would be alone."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Job, Sequence
from asyncrl.inference.embedded.rows import Slots
from asyncrl.inference.engine_io import GenerationInput, GenerationOutput, SamplingSpec
from asyncrl.inference.messages import PauseMode
from tests.engine_steps import drain
from tests.examples import examples


def make_engine(**limits: int) -> GenerationEngine:
    """A model so sure of itself that samples of a group often go on alike."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    model = Qwen2ForCausalLM(config)
    model.lm_head.weight.data *= 120.0
    return GenerationEngine(model, **limits)  # type: ignore[arg-type]


def group(count: int) -> list[GenerationInput]:
    """Two prompts in turn; each sample with a seed and a length of its own."""
    prompts = ((1, 2, 3), (1, 2, 4, 5))
    return [
        GenerationInput(f"s{i}", prompts[i // 4 % 2], SamplingSpec(max_new_tokens=6 + 5 * (i % 4), seed=i))
        for i in range(count)
    ]


def alone(inputs: list[GenerationInput]) -> list[GenerationOutput]:
    outputs, engine = [], make_engine()
    for each in inputs:
        future = engine.submit(Job((each,)))
        drain(engine)
        outputs += future.result(timeout=0)
    return outputs


def assert_equal(found: list[GenerationOutput], expected: list[GenerationOutput]) -> None:
    assert [output.output_ids for output in found] == [output.output_ids for output in expected]
    for mine, its in zip(found, expected, strict=True):
        assert mine.logprobs == pytest.approx(its.logprobs, abs=1e-4)


@pytest.mark.parametrize("limits", [{}, {"max_running_requests": 5}, {"max_total_tokens": 120}], ids=str)
def test_a_group_gets_the_tokens_that_its_samples_get_alone(limits: dict[str, int]) -> None:
    inputs = group(16)
    engine = make_engine(**limits)
    future = engine.submit(Job(tuple(inputs)))
    drain(engine)
    found = future.result(timeout=0)
    assert_equal(found, alone(inputs))
    assert len({tuple(output.output_ids) for output in found}) > 4, "they part"
    assert engine._batch.counts.decoded_rows < 0.9 * engine._batch.counts.generated, "and they share before"


def test_a_greedy_group_is_one_row() -> None:
    inputs = [
        GenerationInput(f"g{i}", (1, 2, 3), SamplingSpec(max_new_tokens=12, temperature=0.0, seed=i)) for i in range(8)
    ]
    engine = make_engine()
    future = engine.submit(Job(tuple(inputs)))
    drain(engine)
    assert len({tuple(output.output_ids) for output in future.result(timeout=0)}) == 1
    assert engine._batch.counts.decoded_rows == 12


def test_those_that_are_interrupted_aborted_or_late_share_and_go_on_alike() -> None:
    inputs = group(12)
    expected = {output.rid: output for output in alone(inputs)}
    engine, random = make_engine(max_running_requests=10), Random(4)
    first = engine.submit(Job(tuple(inputs[:7])))
    second = None
    for step in range(200):
        engine.step()
        if step == 3:
            second = engine.submit(Job(tuple(inputs[7:])))
            engine.abort("s2")
        if random.random() < 0.2:
            engine.pause(random.choice((PauseMode.retract, PauseMode.in_place)))
            drain(engine)
            engine.resume()
    drain(engine)
    assert second is not None
    for output in (*first.result(timeout=0), *second.result(timeout=0)):
        whole = expected[output.rid]
        assert output.output_ids == whole.output_ids[: len(output.output_ids)]
        assert output.logprobs == pytest.approx(whole.logprobs[: len(output.logprobs)], abs=1e-4)
        assert output.rid == "s2" or len(output.output_ids) == len(whole.output_ids)


class AnySlots(RuleBasedStateMachine):
    """Whatever enters, parts, leaves and is packed: who is in a slot has its content."""

    @initialize()
    def begin(self) -> None:
        self.slots = Slots()
        self.content: dict[int, tuple[int, ...]] = {}
        self.reported: dict[Sequence, tuple[int, ...]] = {}
        self.count = 0

    @rule(size=st.integers(1, 4), token=st.integers(0, 2))
    def enter(self, size: int, token: int) -> None:
        spec = SamplingSpec(max_new_tokens=9, seed=1)
        job = Job(tuple(GenerationInput(str(self.count + i), (token, 1), spec) for i in range(size)))
        self.count += size
        sequences = [Sequence.of(job, index, index) for index in range(size)]
        slot = self.slots.enter(sequences)
        self.content[slot] = (token,)
        self.reported |= dict.fromkeys(sequences, (token,))

    @precondition(lambda self: self.reported)
    @rule(seed=st.integers(0, 9999))
    def draw(self, seed: int) -> None:
        random = Random(seed)
        drawn = {sequence: random.randrange(3) for sequence in self.reported}
        first = {index: drawn[members[0]] for index, members in enumerate(self.slots.members) if members}
        differing = [(sequence, token) for sequence, token in drawn.items() if token != first[sequence.slot]]
        copies = self.slots.part(differing)
        assert not set(copies) & set(copies.values()), "what is copied is not overwritten"
        content = {slot: (*self.content[slot], token) for slot, token in first.items()}
        for target, source in copies.items():
            token = drawn[self.slots.members[target][0]]
            content[target] = (*self.content[source], token)
        self.content = content
        self.reported = {sequence: (*reported, drawn[sequence]) for sequence, reported in self.reported.items()}

    @precondition(lambda self: self.reported)
    @rule(pick=st.integers(0, 999))
    def leave(self, pick: int) -> None:
        sequence = list(self.reported)[pick % len(self.reported)]
        self.slots.leave(sequence)
        del self.reported[sequence]

    @rule()
    def pack(self) -> None:
        moved = self.slots.pack()
        assert all(target < len(self.slots) <= source for target, source in moved.items())
        self.content = {slot: self.content[moved.get(slot, slot)] for slot in range(len(self.slots))}
        assert all(self.slots.members)

    @invariant()
    def everyone_reads_its_message(self) -> None:
        assert sum(map(len, self.slots.members)) == len(self.reported)
        for slot, members in enumerate(self.slots.members):
            assert bool(members) != (slot in self.slots.holes)
            for sequence in members:
                assert sequence.slot == slot
                assert self.content[slot] == self.reported[sequence]


TestAnySlots = AnySlots.TestCase
TestAnySlots.settings = settings(max_examples=examples(60), stateful_step_count=30)
