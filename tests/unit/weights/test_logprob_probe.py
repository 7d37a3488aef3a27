"""The probe beside published weights: fixed tokens, the trainer's own log-probabilities, part of the version."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.manager.fleet.fleet_runner import FLOAT32_TOLERANCE
from asyncrl.models.pictures import Pictures
from asyncrl.models.ranks import Ranks
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind, blocks
from asyncrl.trainer.engines.flat import FlatLoader, FlatPolicyEngine
from asyncrl.trainer.messages import Publish
from asyncrl.trainer.model.layout_parity import first_layout
from asyncrl.trainer.model.load_models import load_causal_lm
from asyncrl.trainer.parallel.world import RankPosition, World
from asyncrl.trainer.rank.training_rank import Versions
from asyncrl.trainer.settings import AttentionImplementation
from asyncrl.weights import publishing as weights
from asyncrl.weights.folder_tensors import WholeModel
from asyncrl.weights.logprob_probe import (
    PROBE_FILE,
    PROBE_LENGTHS,
    LogprobProbe,
    ProbePicture,
    ProbeSequence,
    encode_probe,
    probe_picture,
    probe_tokens,
    read_probe,
    with_picture,
)
from asyncrl.weights.manifest import ManifestError, verify
from asyncrl.weights.publishing import SharedFiles


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
        attention=first_layout(AttentionImplementation(attention)).kind,
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


def test_a_picture_in_the_probe_is_read_as_it_was_written_and_scored_as_transformers_does(
    vlm_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = vlm_folder("qwen2_5_vl")
    config = ExperimentConfig()
    config.model.path, config.generation.context_length = str(folder), 256
    config.model.dtype = config.generation.dtype = Dtype.float32
    engine = FlatLoader(config, RankPosition(), torch.device("cpu")).policy(str(folder), Dtype.float32, None)
    picture = probe_picture()
    found = with_picture(40, 256, engine.placeholders(picture), picture)
    assert found is not None
    prompt, placed = found
    assert with_picture(40, len(prompt), engine.placeholders(picture), picture) is None
    probe = LogprobProbe.of([(3, 1, 4), prompt], engine.score_sequences([(3, 1, 4), prompt], [(), (placed,)]), placed)
    (tmp_path / PROBE_FILE).write_bytes(encode_probe(probe))
    read = read_probe(tmp_path)
    assert read == probe
    shown = read.sequences[1]
    assert shown.picture is not None
    assert shown.picture.placed == placed
    assert shown.start == placed.end

    plain = AutoModelForImageTextToText.from_pretrained(str(folder), attn_implementation="eager").eval()
    pictures = Pictures.of(plain, folder)
    assert pictures is not None
    ids, _held = pictures.ids.shown(prompt, [placed])

    def scored() -> list[float]:
        with torch.no_grad():
            all_LV = plain(**pictures.plain_inputs(ids), use_cache=False).logits[0].log_softmax(-1)
        return [float(all_LV[t - 1, prompt[t]]) for t in range(shown.start + 1, len(prompt))]

    assert list(shown.logprobs[shown.start + 1 :]) == pytest.approx(scored(), abs=1e-4)
    with torch.no_grad():
        plain.model.visual.merger.mlp[0].weight.mul_(1.5)
    assert max(abs(a - b) for a, b in zip(shown.logprobs[shown.start + 1 :], scored(), strict=True)) > FLOAT32_TOLERANCE


def test_a_picture_outside_of_its_sequence_is_refused(tmp_path: Path) -> None:
    sequence = ProbeSequence((1, 2), (0.0, -1.0), ProbePicture(1, 1, b""))
    (tmp_path / PROBE_FILE).write_bytes(encode_probe(LogprobProbe((sequence,))))
    with pytest.raises(ManifestError, match="a picture outside of its sequence"):
        read_probe(tmp_path)


@pytest.mark.parametrize(
    ("backend", "kind", "shown"),
    [("embedded", "llava", True), ("sglang", "llava", False), ("sglang", "qwen2_vl", True)],
)
def test_servers_that_take_no_pictures_are_probed_with_text(
    backend: str, kind: str, shown: bool, vlm_folder: Callable[[str], Path], make_rank: Any, tmp_path: Path
) -> None:
    config = ExperimentConfig()
    config.model.path, config.generation.context_length = str(vlm_folder(kind)), 256
    config.model.dtype, config.generation.backend = Dtype.float32, backend
    versions = Versions(config, tmp_path, World(), make_rank(config), None, torch.device("cpu"))
    read = read_probe(versions.publish(Publish("actor", 0, to_disk=True)))
    assert read is not None
    assert [each.picture is not None for each in read.sequences] == [False] * 3 + [True] * shown
