"""The probe beside published weights: fixed tokens, the trainer's own log-probabilities, part of the version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.manager.fleet.logprob_check import FLOAT32_TOLERANCE
from asyncrl.runtime.ranks import Ranks
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind, blocks
from asyncrl.trainer.engines.flat import FlatPolicyEngine
from asyncrl.trainer.model.loading import attention_kind, load_causal_lm
from asyncrl.trainer.settings import AttentionImplementation
from asyncrl.weights.versions import publishing as weights
from asyncrl.weights.versions.logprob_probe import (
    PROBE_FILE,
    PROBE_LENGTHS,
    LogprobProbe,
    encode_probe,
    probe_tokens,
    read_probe,
)
from asyncrl.weights.versions.manifest import ManifestError, verify
from asyncrl.weights.versions.published import WholeModel
from asyncrl.weights.versions.shared_files import SharedFiles


@pytest.mark.parametrize("vocabulary", [1, 17, 150_000])
def test_the_tokens_never_change_and_are_of_the_vocabulary(vocabulary: int) -> None:
    tokens = probe_tokens(vocabulary, context=100)
    assert tokens == probe_tokens(vocabulary, context=5000)
    assert [len(sequence) for sequence in tokens] == list(PROBE_LENGTHS)
    assert set().union(*tokens) <= set(range(vocabulary))


@pytest.mark.parametrize(
    ("context", "lengths"), [(1, []), (2, []), (3, [2, 2, 2]), (12, [11, 11, 6]), (17, [16, 11, 6]), (18, [16, 11, 6])]
)
def test_prompts_and_one_more_token_fit_the_context(context: int, lengths: list[int]) -> None:
    assert [len(tokens) for tokens in probe_tokens(17, context)] == lengths


def test_a_probe_is_read_as_it_was_written(tmp_path: Path) -> None:
    probe = LogprobProbe.of([(3, 1, 4), (5, 2)], [(0.0, -1.5, -2.25), (0.0, -0.5)])
    assert read_probe(tmp_path) is None
    (tmp_path / PROBE_FILE).write_bytes(encode_probe(probe))
    assert read_probe(tmp_path) == probe


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"sequences": []}',
        '{"sequences": [{"token_ids": [1], "logprobs": [0]}]}',
        '{"sequences": [{"token_ids": [1, 2], "logprobs": [0, -1]}, {"token_ids": [1, 2], "logprobs": [0]}]}',
    ],
)
def test_what_is_no_probe_is_refused_with_its_path(content: str, tmp_path: Path) -> None:
    (tmp_path / PROBE_FILE).write_text(content)
    with pytest.raises(ManifestError, match=f"{PROBE_FILE}.*remove"):
        read_probe(tmp_path)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model", ["qwen_dir", "llama_dir"])
def test_the_trainer_scores_the_probe_as_transformers_does(
    model: str, attention: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    engine = FlatPolicyEngine(
        load_causal_lm(folder, "float32", attention, torch.device("cpu")),
        temperature=0.5,
        attention=attention_kind(AttentionImplementation(attention)),
        tokens_per_micro_batch=4,  # below the probe's length
    )
    tokens = probe_tokens(17, context=100)
    plain = AutoModelForCausalLM.from_pretrained(str(folder)).eval()
    with torch.no_grad():
        expected = [torch.log_softmax(plain(torch.tensor([each])).logits[0], -1) for each in tokens]
    for scored, each, all_LV in zip(engine.score_sequences(tokens), tokens, expected, strict=True):
        assert scored[0] == 0.0
        assert scored[1:] == pytest.approx([float(all_LV[t - 1, each[t]]) for t in range(1, len(each))], abs=1e-5)


def test_packed_sequences_that_leak_into_each_other_show_in_the_probe(
    qwen_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_causal_lm(qwen_dir, "float32", "sdpa", torch.device("cpu"))
    engine = FlatPolicyEngine(
        model,
        temperature=1.0,
        attention=AttentionKind.packed,
        tokens_per_micro_batch=64,
    )
    tokens = probe_tokens(17, context=100)
    right = engine.score_sequences(tokens)
    monkeypatch.setattr("asyncrl.trainer.batches.micro_batch.blocks", lambda lengths: blocks([sum(lengths)]))
    leaked = engine.score_sequences(tokens)
    worst = [max(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in zip(right, leaked, strict=True)]
    assert worst[0] < 1e-5  # the first has none before it
    assert min(worst[1:]) > FLOAT32_TOLERANCE


def test_the_probe_is_part_of_the_version_and_no_asset_of_the_next_model(qwen_dir: Path, tmp_path: Path) -> None:
    model = load_causal_lm(qwen_dir, "float32", "sdpa", torch.device("cpu"))
    probe = LogprobProbe.of([(3, 1, 4), (5, 2)], [(0.0, -1.5, -2.25), (0.0, -0.5)])
    source, shared = WholeModel(model), SharedFiles(model.config)
    path = weights.publish(source, tmp_path, role="actor", version=1, ranks=Ranks(), shared=shared, probe=probe)
    assert read_probe(path) == probe
    assert PROBE_FILE in verify(path).files
    assert PROBE_FILE not in weights.tokenizer_assets(path)
    (path / PROBE_FILE).write_text(json.dumps({"sequences": [{"token_ids": [3, 1], "logprobs": [0.0, -1.5]}]}))
    with pytest.raises(ManifestError, match=PROBE_FILE):
        verify(path)
