"""The embedded engine with pictures: what it samples has the log-probabilities that transformers computes of pixels."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.engine_io import GenerationInput, GenerationOutput, RequestError, SamplingSpec
from asyncrl.inference.messages import PauseMode
from asyncrl.models.parity import UnsupportedModelError, plain_logprobs
from asyncrl.models.pictures import Pictures
from asyncrl.models.transformers_internals import attention
from tests.engine_steps import drain
from tests.tiny_vlm import KINDS, make_folder, picture, render, shown_inputs

Folder = Callable[[str], Path]
SAMPLE = {
    "qwen3_vl": "positions in three dimensions, features of the tower added to layers of the text model",
    "llava_onevision": "a grid of tiles with ends of rows",
    "gemma3": "tokens of a picture see each other",
    "mistral3": "patches merged, pictures of any size",
}
TOKENS = 7
BFLOAT16 = 0.12
"""Most that log-probabilities (nats) of the tiny models in bfloat16 are from those in fp32."""


def _load(folder: Path) -> tuple[PreTrainedModel, Pictures]:
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    pictures = Pictures.of(model, folder)
    assert pictures is not None
    return model, pictures


def _engine(folder: Path, **limits: int) -> GenerationEngine:
    model, pictures = _load(folder)
    return GenerationEngine(model, model_path=str(folder), max_model_len=256, pictures=pictures, **limits)


def _ask(rid: str, folder: Path, *parts: str | Picture, greedy: bool = False, tokens: int = TOKENS) -> GenerationInput:
    prompt = render(folder, *parts)
    spec = SamplingSpec(max_new_tokens=tokens, temperature=0.0 if greedy else 1.0, seed=len(rid) * 31 + ord(rid[-1]))
    return GenerationInput(rid, tuple(prompt.ids), spec, pictures=prompt.placed)


def _run(engine: GenerationEngine, *inputs: GenerationInput) -> list[GenerationOutput]:
    future = engine.submit(Job(inputs))
    drain(engine)
    return future.result(timeout=0)


def _expected(model: PreTrainedModel, pictures: Pictures, request: GenerationInput, answer: list[int]) -> list[float]:
    """Log-probabilities of an answer by a plain forward."""
    logits = _logits(model, pictures, request, answer)
    chosen: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
    return chosen


def _logits(model: PreTrainedModel, pictures: Pictures, request: GenerationInput, answer: list[int]) -> Tensor:
    """Logits before each token of an answer by a plain forward, which takes placeholders in it for ordinary tokens: so
    transformers' own cannot be asked, which `tests/unit/models/test_pictures.py` compares with this one."""
    shown, _held = pictures.ids.shown([*request.input_ids, *answer], request.pictures)
    inputs = shown_inputs(pictures, shown)
    with torch.no_grad(), attention(model, "eager"), pictures.holding(inputs["input_ids"].numpy(), keep=True):
        logits: Tensor = model(**inputs, use_cache=False).logits[0]
    return logits[len(request.input_ids) - 1 : -1]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in SAMPLE else [pytest.mark.every_case]) for kind in KINDS]
)
def test_groups_over_pictures_are_what_transformers_computes_through_an_update(
    kind: str, vlm_folder: Folder, tmp_path: Path
) -> None:
    folder, newer = vlm_folder(kind), make_folder(kind, tmp_path / "newer", seed=9)
    engine = _engine(folder, max_running_requests=8)
    plain, pictures = _load(folder)
    first, second, third = picture(1), picture(2), picture(3, 112, 56)
    requests = [
        *(_ask(f"a{n}", folder, "<u>how ", first, "?<end><a>", greedy=n == 0) for n in range(4)),
        *(_ask(f"b{n}", folder, "<u>how ", second, "?<end><a>", greedy=n == 0) for n in range(3)),
        *(_ask(f"c{n}", folder, "<u>how ", first, "?<end><a>3<end><u>", third, "red<end><a>") for n in range(2)),
        _ask("d0", folder, "<u>", first, "a", first, "b", second, "red<end><a>"),
        _ask("e0", folder, "<u>how many red?<end><a>"),
    ]
    outputs = _run(engine, *requests)
    for request, output in zip(requests, outputs, strict=True):
        assert output.logprobs == pytest.approx(_expected(plain, pictures, request, output.output_ids), abs=2e-4)
    assert engine.stats().encoded_pictures == 3, "each picture once for all its requests"
    assert outputs[0].logprobs[0] != pytest.approx(outputs[4].logprobs[0], abs=1e-3), "ids alike, pictures not"
    answer = outputs[0].output_ids
    assert _logits(plain, pictures, requests[0], answer).argmax(-1).tolist() == answer

    # interrupted in the midst of answers; other weights go on with them
    held = [replace(each, rid=f"{each.rid}/again") for each in requests]
    future = engine.submit(Job(tuple(held)))
    for _ in range(4):
        engine.step()
    engine.pause(PauseMode.retract)
    loading = engine.update_weights(str(newer), "2")
    engine.step()
    assert loading.result(timeout=0) == 0
    engine.resume()
    drain(engine)
    after, other = _load(newer)
    mixed = 0
    for request, output in zip(held, future.result(timeout=0), strict=True):
        reported = {
            "default": _expected(plain, pictures, request, output.output_ids),
            "2": _expected(after, other, request, output.output_ids),
        }
        for span in output.spans:
            assert output.logprobs[span.start : span.end] == pytest.approx(
                reported[span.version][span.start : span.end], abs=2e-4
            )
        mixed += len(output.spans) > 1
    assert mixed
    assert engine.stats().encoded_pictures == 6, "and once more for other weights"


def test_a_sampled_placeholder_and_scored_prompts_change_nothing(vlm_folder: Folder) -> None:
    folder = vlm_folder("qwen3_vl")
    engine = _engine(folder)
    plain, pictures = _load(folder)
    asked = _ask("a0", folder, "<u>how ", picture(1), "?<end><a>")
    odd = replace(asked, rid="b0", input_ids=(*asked.input_ids, pictures.ids.token_id, 20), prompt_logprobs_from=0)
    (output,) = _run(engine, odd)
    assert output.logprobs == pytest.approx(_expected(plain, pictures, odd, output.output_ids), abs=2e-4)
    scored = replace(asked, rid="c0", prompt_logprobs_from=0)
    (output,) = _run(engine, scored)
    ids, _held = pictures.ids.shown(asked.input_ids, asked.pictures)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[1:] == pytest.approx(plain_logprobs(plain, ids, pictures).tolist(), abs=2e-4)


def test_requests_whose_pictures_do_not_fit_are_refused(vlm_folder: Folder) -> None:
    folder = vlm_folder("qwen2_vl")
    engine = _engine(folder)
    asked = _ask("a0", folder, "<u>", picture(1), "?<end><a>")
    (placed,) = asked.pictures
    short = PlacedPicture(placed.position, placed.length - 1, placed.picture)
    with pytest.raises(RequestError, match=r"pictures of prompt 0: picture 0 of .* has 4 rows"):
        engine.submit(Job((replace(asked, pictures=(short,)),)))
    with pytest.raises(RequestError, match="prompt 0 ends with a picture"):
        engine.submit(Job((replace(asked, input_ids=asked.input_ids[: placed.end]),)))


def test_a_picture_that_is_seen_in_both_directions_is_never_cut(vlm_folder: Folder) -> None:
    """A part of a long prompt would end within each picture, as each turn's first tokens are kept of the one before."""
    folder = vlm_folder("gemma3")
    engine = _engine(folder, max_running_requests=4, chunked_prefill_size=6)
    plain, pictures = _load(folder)
    assert pictures.two_way
    first, second = picture(1), picture(2)
    short = ("<u>", first, "a<end><a>")
    longer = ("<u>", first, "a", second, "how many red?", first, "b", second, "green<end><a>")
    for requests in ([_ask("a0", folder, *short)], [_ask("b0", folder, *longer), _ask("c0", folder, *longer[:4], "c")]):
        for request, output in zip(requests, _run(engine, *requests), strict=True):
            expected = _expected(plain, pictures, request, output.output_ids)
            assert output.logprobs == pytest.approx(expected, abs=2e-4)
    asked = _ask("d0", folder, *short)
    (placed,) = asked.pictures
    ids = asked.input_ids
    twice = (*ids[: placed.end], *ids[placed.position :])
    shown = (placed, placed.shifted(placed.length))
    with pytest.raises(RequestError, match="follows another without a token between them"):
        engine.submit(Job((replace(asked, input_ids=twice, pictures=shown),)))


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_bfloat16_stays_near_fp32(kind: str, vlm_folder: Folder) -> None:
    folder = vlm_folder(kind)
    exact, exact_pictures = _load(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()
    pictures = Pictures.of(model, folder)
    engine = GenerationEngine(model, model_path=str(folder), max_model_len=256, pictures=pictures)
    first, second = picture(1), picture(2)
    requests = [_ask(f"a{n}", folder, "<u>how ", first, "?<end><a>") for n in range(2)]
    requests += [_ask("b0", folder, "<u>how ", second, "?<end><a>3<end><u>", picture(3, 112, 56), "red<end><a>")]
    for request, output in zip(requests, _run(engine, *requests), strict=True):
        expected = _expected(exact, exact_pictures, request, output.output_ids)
        assert output.logprobs == pytest.approx(expected, abs=BFLOAT16)
        assert output.logprobs != pytest.approx(expected, abs=1e-4), "it computes in bfloat16"
        shown = tuple(replace(each, picture=picture(7, *each.picture.size)) for each in request.pictures)
        others = _expected(exact, exact_pictures, replace(request, pictures=shown), output.output_ids)
        assert others != pytest.approx(expected, abs=BFLOAT16), "other pictures make more of a difference"


def test_a_model_that_does_not_look_is_refused(vlm_folder: Folder, tmp_path: Path) -> None:
    folder = tmp_path / "blind"
    shutil.copytree(vlm_folder("internvl"), folder)
    model, _ = _load(folder)
    with torch.no_grad():
        for parameter in model.base_model.multi_modal_projector.parameters():
            parameter.zero_()
    model.save_pretrained(str(folder))
    with pytest.raises(UnsupportedModelError, match="it computes the same whatever the picture"):
        _engine(folder)


def test_distinct_pictures_leave_no_more_than_the_limit(vlm_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python tests/stress/picture_memory.py` does so with 10,000, and reads the resident memory."""
    limit = 1 << 18  # three of them
    monkeypatch.setattr("asyncrl.models.pictures.RECENT_BYTES", limit)
    folder = vlm_folder("qwen2_vl")
    engine = _engine(folder)
    asked = _ask("r", folder, "<u>", picture(0), "<end><a>", tokens=1)
    for number in range(60):
        (placed,) = asked.pictures
        shown = (replace(placed, picture=picture(number)),)
        _run(engine, replace(asked, rid=f"r{number}", pictures=shown))
    gc.collect()
    assert engine._pictures is not None
    ids = engine._pictures.ids
    assert engine.stats().encoded_pictures == 60
    assert 0 < ids._recent_bytes <= limit
    assert len(ids._by_first) == len(ids._seen) == len(ids._recent) < 5


@pytest.mark.parametrize("kind", ["qwen2_vl", "internvl", "gemma3"])
def test_the_next_turn_over_a_picture_computes_its_new_tokens_alone(kind: str, vlm_folder: Folder) -> None:
    folder = vlm_folder(kind)
    engine = _engine(folder, max_running_requests=2, max_total_tokens=600)
    plain, pictures = _load(folder)
    request = _ask("t0", folder, "<u>how ", picture(1), "?<end><a>")
    known = 0
    for turn, shown in enumerate((picture(2, 112, 56), picture(1), None)):
        (output,) = _run(engine, request)
        expected = _expected(plain, pictures, request, output.output_ids)
        assert output.logprobs == pytest.approx(expected, abs=2e-4)
        assert output.cached_tokens == known
        history = (*request.input_ids, *output.output_ids)
        known = len(history) - 1
        more = render(folder, "<end><u>", *([] if shown is None else [shown]), "red<end><a>")
        moved = tuple(each.shifted(len(history)) for each in more.placed)
        spec = replace(request.sampling, seed=turn)
        request = GenerationInput(f"t{turn + 1}", (*history, *more.ids), spec, pictures=(*request.pictures, *moved))
    assert engine.stats().encoded_pictures == 2
