"""A stream holds every distinct prefix once, and what is computed from it is what packed sequences give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Gemma2Config, GptOssConfig, MistralConfig, PretrainedConfig, Qwen3Config

from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.models.chunked_logprobs import EntropyMode
from asyncrl.trainer.batches import micro_batch_layout
from asyncrl.trainer.batches.micro_batch import MicroBatch, one_micro_batch
from asyncrl.trainer.batches.micro_batch_layout import (
    MAX_BLOCK_WASTE,
    AttentionKind,
    Branches,
    Prefixes,
    PrefixOrder,
    cut_tree,
    distinct_tokens,
    lay_out,
)
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.engines.base import PolicyOutputs
from asyncrl.trainer.engines.flat import FlatOptimizer, FlatPolicyEngine, FlatValueEngine
from asyncrl.trainer.model.attention import PACKED, VARLEN, packed_attention, varlen_attention
from asyncrl.trainer.model.load_models import load_causal_lm
from asyncrl.trainer.model.value_models import load_critic
from asyncrl.trainer.settings import OptimizerConfig

CPU = torch.device("cpu")
VOCABULARY = 17
sequence_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=14)


def order_of(sequences: list[list[int]]) -> tuple[PrefixOrder, np.ndarray]:
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    tokens = np.array([token for sequence in sequences for token in sequence], dtype=np.int64)
    return PrefixOrder.of(tokens, np.cumsum(lengths) - lengths, lengths), lengths


def distinct(sequences: list[list[int]]) -> int:
    return len({tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))})


@given(sequence_lists)
def test_every_distinct_prefix_is_one_token(sequences: list[list[int]]) -> None:
    order, lengths = order_of(sequences)
    assert order.branches(range(len(sequences)), lengths).tokens == distinct(sequences)
    group = [
        Sample(
            tokens=np.array(sequence, np.int32),
            loss_mask=np.zeros(len(sequence), np.uint8),
            behave_logprobs=np.zeros(len(sequence), np.float32),
            versions=np.full(len(sequence), -1, np.int32),
            reward=0.0,
        )
        for sequence in sequences
    ]
    assert distinct_tokens(group) == distinct(sequences)


@given(sequence_lists, st.data())
def test_parts_and_shorter_sequences_are_tries_too(sequences: list[list[int]], data: st.DataObject) -> None:
    order, lengths = order_of(sequences)
    part = data.draw(st.lists(st.sampled_from(range(len(sequences))), min_size=1, unique=True))
    cut_at = np.array([data.draw(st.integers(1, int(length))) for length in lengths])
    tree = order.branches(part, cut_at)
    assert sorted(tree.members.tolist()) == sorted(part)
    assert tree.tokens >= distinct([sequences[seq][: cut_at[seq]] for seq in part])
    before: list[int] = []
    for seq, length, shared in zip(tree.members, tree.lengths, tree.shared, strict=True):
        mine = sequences[seq][:length]
        assert mine[:shared] == before[:shared]
        before = mine


@given(sequence_lists, st.sampled_from([1, 40, 1 << 24]))
def test_rows_look_at_their_own_path_and_their_outputs_are_the_stream(
    sequences: list[list[int]], mask_bytes: int
) -> None:
    order, lengths = order_of(sequences)
    tree = order.branches(range(len(sequences)), lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch_layout, "MAX_MASK_BYTES", mask_bytes)
        stream = lay_out(tree)
    ordered = [sequences[seq] for seq in tree.members]
    held = np.full(stream.size, -1)
    held[stream.indices_I] = [token for sequence in ordered for token in sequence]
    assert (held >= 0).all(), "a position of the stream that no sequence has"
    prefix_of: dict[int, tuple[int, ...]] = {}
    indices = iter(stream.indices_I.tolist())
    for sequence in ordered:
        for end in range(len(sequence)):
            assert prefix_of.setdefault(next(indices), tuple(sequence[: end + 1])) == tuple(sequence[: end + 1])
    computed = []
    for block in stream.blocks:
        keys = block.gather.reshape(block.rows, block.width)
        asking = keys if block.query_gather is None else block.query_gather.reshape(block.rows, -1)
        first = np.zeros(block.rows, int) if block.first is None else block.first
        for index in block.scatter:
            row, column = divmod(int(index), asking.shape[1])
            position = int(asking[row, column])
            computed.append(position)
            assert tuple(held[keys[row, : first[row] + column + 1]]) == prefix_of[position]
    assert computed == list(range(stream.size))


LAYOUTS = st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 4000)), min_size=1, max_size=40)


@given(LAYOUTS, st.sampled_from([1000, 1 << 20, 1 << 24]))
def test_a_tree_computes_no_more_pairs_than_packed_sequences(rows: list[tuple[int, int]], mask_bytes: int) -> None:
    """But for the padding that blocks may have."""
    shared = np.minimum([0, *(wanted for wanted, _ in rows[1:])], np.array([0] + [s + o for s, o in rows])[:-1])
    lengths = np.array([own for _, own in rows]) + shared
    shared[1:] = np.minimum(shared[1:], lengths[:-1])
    tree = Branches(np.arange(len(rows)), lengths, shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch_layout, "MAX_MASK_BYTES", mask_bytes)
        found = sum(block.pairs for block in lay_out(tree).blocks)
    packed = sum(length * (length + 1) // 2 for length in lengths.tolist())
    longest = int(lengths.max())
    assert found <= (1.0 + MAX_BLOCK_WASTE) ** 2 * packed + longest, (found, packed)


@pytest.mark.parametrize(
    ("samples", "prompt", "answer", "share"),
    [(8, 12_000, 3_000, 1.0), (16, 300, 1_000, 1.0), (16, 6_000, 500, 0.21)],
    ids=["agent, long turns", "maths", "agent, short turns"],
)
def test_pairs_of_a_group_beside_those_of_packed_sequences(
    samples: int, prompt: int, answer: int, share: float
) -> None:
    length = prompt + answer
    shared = np.array([0] + [prompt] * (samples - 1))
    stream = lay_out(Branches(np.arange(samples), np.full(samples, length), shared))
    assert stream.size == prompt + samples * answer
    pairs = sum(block.pairs for block in stream.blocks)
    assert pairs <= share * samples * length * (length + 1) // 2


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention by a mask [T, T] and nothing else; [1, T, heads, size] as of the functions under test."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * 0.5
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)), dim=-1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


@given(
    sequence_lists,
    st.sampled_from([None, 1, 3]),
    st.sampled_from([None, 1.5]),
    st.booleans(),
    st.sampled_from([(2, 2), (4, 2), (4, 1)]),
    st.sampled_from([1, 100, 1 << 24]),
)
def test_every_attention_over_a_random_tree_is_that_of_a_plain_mask_forward_and_backward(
    sequences: list[list[int]],
    window: int | None,
    softcap: float | None,
    sink: bool,
    heads: tuple[int, int],
    mask_bytes: int,
) -> None:
    torch.manual_seed(0)
    sinks = torch.randn(heads[0], requires_grad=True) if sink else None
    for kind, attention in (
        (AttentionKind.tree, packed_attention),
        (AttentionKind.packed, packed_attention),
        (AttentionKind.packed, varlen_attention),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(micro_batch_layout, "MAX_MASK_BYTES", mask_bytes)
            made = one_micro_batch(sequences, kind, CPU, wanted=False)
        size = made.model_inputs["input_ids"].numel()
        visible, indices = torch.eye(size, dtype=torch.bool), iter(made.indices_I.tolist())
        for seq in made.seqs:
            path = [next(indices) for _ in sequences[seq]]
            for depth, index in enumerate(path):
                visible[index, path[0 if window is None else max(0, depth + 1 - window) : depth + 1]] = True
        query, key, value = (torch.randn(1, each, size, 8, requires_grad=True) for each in (heads[0], *heads[1:] * 2))
        reported = {name: each for name, each in made.model_inputs.items() if name not in ("input_ids", "position_ids")}
        reported |= {"scaling": 0.5, "sliding_window": window, "softcap": softcap, "s_aux": sinks}
        if attention is varlen_attention and (softcap is not None or sink):
            with pytest.raises(NotImplementedError, match="no capped logits, sinks"):
                attention(nn.Module(), query, key, value, None, **reported)
            continue
        found, _ = attention(nn.Module(), query, key, value, None, **reported)
        expected = plain_attention(query, key, value, visible, softcap, sinks)
        weights, inputs = torch.randn_like(expected), [query, key, value, *([] if sinks is None else [sinks])]
        pairs = [(found, expected)]
        pairs += zip(*(torch.autograd.grad((out * weights).sum(), inputs) for out in (found, expected)), strict=True)
        for ours, plain in pairs:
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def a_root_and(rows: list[tuple[int, int]]) -> Branches:
    """A sequence, and others of the given lengths, of whose tokens so many are their own."""
    lengths, own = np.array(rows).T
    return Branches(np.arange(len(rows) + 1), np.array([lengths.max(), *lengths]), np.array([0, *(lengths - own)]))


@pytest.mark.parametrize("length", [4, 5])
def test_a_row_asks_only_for_its_own_tokens_where_that_computes_fewer_pairs(length: int) -> None:
    for own in range(1, length):
        made = lay_out(a_root_and([(length, own)])).blocks
        whole = length * (length + 1) // 2
        masked = own * length < whole
        assert [block.queries for block in made] == ([None, own] if masked else [None])
        assert sum(block.pairs for block in made) == whole + min(own * length, whole)


@pytest.mark.parametrize(("own", "queries"), [(2048, [None, 2048]), (2049, [None])])
def test_a_mask_of_more_than_16_mib_is_not_made(own: int, queries: list[int | None]) -> None:
    assert [block.queries for block in lay_out(a_root_and([(8192, own)])).blocks] == queries


@pytest.mark.parametrize(("own", "rows"), [((5, 3), [1, 2]), ((6, 3), [1, 1, 1]), ((3, 6), [1, 1, 1])])
def test_a_masked_block_takes_rows_until_a_quarter_of_its_pairs_would_be_padding(
    own: tuple[int, int], rows: list[int]
) -> None:
    assert [block.rows for block in lay_out(a_root_and([(20, each) for each in own])).blocks] == rows


def test_equal_tokens_are_shared_unless_they_show_other_pictures() -> None:
    one, two = (Picture.from_array(np.full((2, 2, 3), shade, np.uint8)) for shade in (0, 255))
    tokens = np.array([7, 0, 0, 7, 0, 0, 7, 0, 0, 1, 2], dtype=np.int32)
    shown = [(PlacedPicture(1, 2, one),), (PlacedPicture(1, 2, one),), (PlacedPicture(1, 2, two),), ()]
    symbols = micro_batch_layout.picture_symbols(tokens, np.array([0, 3, 6, 9]), shown).tolist()
    assert symbols[:3] == symbols[3:6] != symbols[6:9]
    assert len({*symbols}) == 2 + 2 + 1 + 2, "places of two pictures, and three tokens of text"
    assert all(symbol < 0 for at in (1, 4, 7) for symbol in symbols[at : at + 2])
    assert micro_batch_layout.picture_symbols(tokens, np.array([0, 3, 6, 9]), []).tolist() == tokens.tolist()


@given(sequence_lists, st.integers(1, 60), st.data())
def test_cuts_hold_every_sequence_once_within_the_budget_and_groups_whole_where_they_fit(
    sequences: list[list[int]], budget: int, data: st.DataObject
) -> None:
    order, lengths = order_of(sequences)
    groups = np.array([data.draw(st.integers(0, 3)) for _ in sequences], dtype=np.int64)
    parts = cut_tree(Prefixes(order, groups), range(len(sequences)), lengths, budget)
    assert sorted(seq for part in parts for seq in part.members.tolist()) == list(range(len(sequences)))
    assert all(part.tokens <= budget or len(part.members) == 1 for part in parts)
    for group in set(groups.tolist()):
        members = np.flatnonzero(groups == group).tolist()
        if order.branches(members, lengths).tokens <= budget:
            assert sum(bool(set(part.members.tolist()) & set(members)) for part in parts) == 1


def test_a_group_that_exceeds_the_budget_is_cut_as_late_as_it_allows() -> None:
    sequences = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [1, 2, 6, 8]]
    order, lengths = order_of(sequences)
    for budget, parts in ((5, [[0, 1], [2, 3]]), (7, [[0, 1, 2], [3]]), (8, [[0, 1, 2, 3]])):
        made = cut_tree(Prefixes(order, np.zeros(4, dtype=np.int64)), range(4), lengths, budget)
        assert [part.members.tolist() for part in made] == parts


@pytest.fixture(scope="module")
def batch() -> StepBatch:
    """Groups with a prompt; answers that fork late, end early, are equal; an environment's turn; one system prompt."""
    rng = np.random.default_rng(3)
    system = rng.integers(0, VOCABULARY, 5)
    trajectories = []
    for group in range(4):
        prompt = np.concatenate((system, rng.integers(0, VOCABULARY, int(rng.integers(3, 9)))))
        answer = rng.integers(0, VOCABULARY, 14)
        samples = []
        for member in range(6):
            same = (14, 14, 9, 6, 2, 0)[member]
            rest = rng.integers(0, VOCABULARY, (0, 0, 3, 9, 0, 12)[member])
            tokens = np.concatenate((prompt, answer[:same], rest)).astype(np.int32)
            mask = (np.arange(len(tokens)) >= len(prompt)).astype(np.uint8)
            mask[len(prompt) + 3 : len(prompt) + 5] = 0
            noise = rng.standard_normal(len(tokens))
            versions = np.where(mask, 0, -1).astype(np.int32)
            behave = (mask * (-2.8 + 0.1 * noise)).astype(np.float32)
            samples.append(Sample(tokens, mask, behave, versions, float(member % 2)))
        trajectories.append(Trajectory(f"r{group}", f"p{group}", group, tuple(samples)))
    return build_step_batch(trajectories, [0] * 4, version=1, num_minibatches=1)


MODELS: dict[str, PretrainedConfig | None] = {
    "qwen2, tied": None,
    "qwen3, grouped queries": Qwen3Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=32, vocab_size=VOCABULARY,
    ),
    "mistral, sliding window": MistralConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
        vocab_size=VOCABULARY, sliding_window=4,
    ),
    "gemma 2, capped logits": Gemma2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=32, vocab_size=VOCABULARY, sliding_window=6,
    ),
    "gpt-oss, sinks": GptOssConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=16, vocab_size=VOCABULARY, num_local_experts=2, num_experts_per_tok=1, sliding_window=6,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def folder(
    request: pytest.FixtureRequest,
    qwen_dir: Path,
    saved_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    config = MODELS[request.param]
    return qwen_dir if config is None else saved_model(tmp_path_factory.mktemp("model"), config)


def policy(folder: Path, kind: AttentionKind, budget: int, attention: str | None = None) -> FlatPolicyEngine:
    model = load_causal_lm(str(folder), "float32", "sdpa", CPU)
    model.set_attn_implementation(attention or PACKED)
    return FlatPolicyEngine(
        model,
        temperature=0.9,
        attention=kind,
        tokens_per_micro_batch=budget,
        optimizer=FlatOptimizer(model.named_parameters(), OptimizerConfig()),
    )


@pytest.fixture(params=[1 << 24, 100], ids=["masked rows", "whole rows"])
def mask_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch_layout, "MAX_MASK_BYTES", request.param)


@pytest.mark.usefixtures("mask_bytes")
@pytest.mark.parametrize("budget", [30, 10_000])
def test_logprobs_entropies_and_gradients_are_those_of_packed_sequences(
    folder: Path, batch: StepBatch, budget: int
) -> None:
    weights_T = torch.linspace(-1, 1, batch.num_tokens)
    results: dict[AttentionKind, tuple[Tensor, Tensor, float]] = {}
    streams: dict[AttentionKind, int] = {}
    for kind in (AttentionKind.packed, AttentionKind.tree):
        engine = policy(folder, kind, budget)
        streams[kind] = 0

        def share(micro_batch: MicroBatch, outputs: PolicyOutputs, kind: AttentionKind = kind) -> tuple[Tensor, dict]:
            assert outputs.entropy_N is not None
            streams[kind] += micro_batch.model_inputs["input_ids"].numel()
            return (outputs.logprobs_N * weights_T[micro_batch.targets_N] + 0.1 * outputs.entropy_N).sum(), {}

        loss, _ = engine.compute_gradients(
            batch, batch["loss_mask"], range(batch.num_seqs), share, entropy=EntropyMode.differentiable
        )
        logprobs_T = engine.logprobs(batch, batch["loss_mask"])
        results[kind] = logprobs_T, engine.optimizer.grad.clone(), float(loss)
    packed, tree = results[AttentionKind.packed], results[AttentionKind.tree]
    assert streams[AttentionKind.tree] < 0.75 * streams[AttentionKind.packed]
    torch.testing.assert_close(tree[0], packed[0], rtol=0, atol=2e-6)
    scale = packed[1].abs().max()
    torch.testing.assert_close(tree[1] / scale, packed[1] / scale, rtol=0, atol=2e-6)
    assert tree[2] == pytest.approx(packed[2], abs=1e-4)


@pytest.mark.parametrize("budget", [30, 10_000])
def test_the_rule_of_torchs_variable_length_kernel_gives_what_packed_attention_gives(
    folder: Path, batch: StepBatch, budget: int
) -> None:
    """Forward and backward, with grouped queries and windows; capped logits and sinks are refused by name."""
    weights_T = torch.linspace(-1, 1, batch.num_tokens)

    def share(micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict]:
        return (outputs.logprobs_N * weights_T[micro_batch.targets_N]).sum(), {}

    results = []
    for attention in (PACKED, VARLEN):
        engine = policy(folder, AttentionKind.packed, budget, attention)
        if attention == VARLEN and engine.model_config.model_type in ("gemma2", "gpt_oss"):
            with pytest.raises(NotImplementedError, match="no capped logits, sinks"):
                engine.logprobs(batch, batch["loss_mask"])
            return
        engine.compute_gradients(batch, batch["loss_mask"], range(batch.num_seqs), share)
        results.append((engine.logprobs(batch, batch["loss_mask"]), engine.optimizer.grad.clone()))
    (packed, packed_grad), (found, found_grad) = results
    torch.testing.assert_close(found, packed, rtol=0, atol=2e-6)
    scale = packed_grad.abs().max()
    torch.testing.assert_close(found_grad / scale, packed_grad / scale, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 4])
def test_torchs_variable_length_kernel_takes_what_it_is_given(window: int | None) -> None:
    """On tensors that have shapes and no values: torch's own checks of its arguments."""
    with torch.device("meta"):
        query, key, value = (
            torch.randn(1, heads, 30, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
        )
        ends = torch.tensor([0, 20, 30], dtype=torch.int32)
        out, _ = varlen_attention(
            nn.Module(), query, key, value, None, cu_seq_lens_q=ends, max_length_q=20, sliding_window=window
        )
        assert (out.shape, out.dtype, out.device.type) == ((1, 30, 4, 16), torch.bfloat16, "meta")
        gradients = torch.autograd.grad(out.sum(), (query, key, value))
        assert [each.shape for each in gradients] == [query.shape, key.shape, value.shape]


def test_values_of_all_tokens_are_those_of_packed_sequences(qwen_dir: Path, batch: StepBatch) -> None:
    values = []
    for kind in (AttentionKind.packed, AttentionKind.tree):
        critic = load_critic(str(qwen_dir), "float32", "sdpa", CPU)
        torch.manual_seed(0)
        torch.nn.init.normal_(critic.head.weight)
        critic.trunk.set_attn_implementation(PACKED)
        values.append(FlatValueEngine(critic, attention=kind, tokens_per_micro_batch=100).outputs(batch))
    assert values[0].abs().min() > 0
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=2e-6)


def test_samples_that_share_next_to_nothing_are_packed(qwen_dir: Path, make_batch: Callable[..., StepBatch]) -> None:
    batch = make_batch(groups=16, group_size=1)
    kinds = []
    for kind in (AttentionKind.packed, AttentionKind.tree):
        made = list(policy(qwen_dir, kind, 10_000).micro_batches(batch, batch["loss_mask"]))
        kinds.append([micro_batch.seqs for micro_batch in made])
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("kind", AttentionKind)
@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=9), st.booleans())
def test_every_layout_has_each_token_at_its_place_and_scores_it_with_the_output_before(
    kind: AttentionKind, sequences: list[list[int]], wanted: bool
) -> None:
    made = one_micro_batch(sequences, kind, CPU, wanted=wanted)
    ids, positions = (made.model_inputs[name].flatten() for name in ("input_ids", "position_ids"))
    ordered = [sequences[seq] for seq in made.seqs]
    read = [sequence[: len(sequence) - wanted] for sequence in ordered]
    assert sorted(made.seqs) == list(range(len(sequences)))
    assert ids[made.indices_I].tolist() == [token for sequence in read for token in sequence]
    assert positions[made.indices_I].tolist() == [index for sequence in read for index in range(len(sequence))]
    assert sorted(made.depths.tolist()) == sorted(positions[made.indices_I.unique()].add(1).tolist())
    scored = [(n, at) for n, sequence in enumerate(ordered) for at in range(1, len(sequence)) if wanted]
    assert made.tokens_N.tolist() == [ordered[n][at] for n, at in scored]
    assert made.seq_ids_N.tolist() == [n for n, _ in scored]
    assert positions[made.predictors_N].tolist() == [at - 1 for _, at in scored]
    assert ids[made.predictors_N].tolist() == [ordered[n][at - 1] for n, at in scored]


def test_sequences_are_laid_out_together_with_each_prefix_once() -> None:
    sequences = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4], [7]]
    made = one_micro_batch(sequences, AttentionKind.tree, CPU, wanted=False)
    assert made.model_inputs["input_ids"].numel() == 6
    assert sorted(made.model_inputs["position_ids"][0].tolist()) == [0, 0, 1, 2, 3, 3]
