"""Pictures for SGLang servers, as far as no SGLang is needed: how they are sent, placed, checked and refused."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForImageTextToText

from asyncrl.api.picture import PlacedPicture
from asyncrl.comm.http_client import JsonHttp
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.checks import check
from asyncrl.inference.client import GenerationServerClient, MalformedReply, PictureSender
from asyncrl.inference.messages import GenerateRequest, inline_picture
from asyncrl.inference.program_host import PortBlock, reserve_ports
from asyncrl.inference.sglang import host
from asyncrl.inference.sglang.backend import SGLANG_PICTURES
from asyncrl.inference.sglang.host import build_command, fault_in_pictures
from asyncrl.models.pictures import Pictures
from asyncrl.rollout.user_code.prompts import pictures_taken
from asyncrl.trainer.settings import VisionMode
from tests.tiny_vlm import picture, render

PLUGIN = Path(host.__file__).parent / "plugin"


def plugin_module(name: str) -> Any:
    """A module of the plug-in that needs no SGLang."""
    spec = importlib.util.spec_from_file_location(name, PLUGIN / "asyncrl_pictures" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", sorted(SGLANG_PICTURES))
def test_positions_in_sglangs_process_are_transformers(kind: str, vlm_folder: Callable[[str], Path]) -> None:
    folder = vlm_folder(kind)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    pictures, merge = Pictures.of(model, folder), model.config.vision_config.spatial_merge_size
    assert pictures is not None
    prompt = render(folder, "<u>how ", picture(1), "?<end><a>3<end><u>", picture(2, 112, 56), " ", picture(3), "red")
    sampled = [*prompt.ids, pictures.ids.token_id, 20]  # a placeholder that the policy sampled is an ordinary token
    shown, seen = pictures.ids.shown(sampled, prompt.placed)
    grids = [(int(each.inputs["image_grid_thw"][0, 1]), int(each.inputs["image_grid_thw"][0, 2])) for each in seen]
    grids = [(rows // merge, columns // merge) for rows, columns in grids]
    spans = [(each.position, each.length) for each in prompt.placed]
    places, delta = plugin_module("positions").positions(len(sampled), spans, grids)
    expected = pictures.positions([*shown, 20])
    np.testing.assert_array_equal(places, expected[:, :-1])
    assert expected[:, -1].tolist() == [len(sampled) + delta] * 3


@pytest.mark.parametrize(
    ("spans", "messages"),
    [([(2, 3)], "2 x 2 tokens, and its span 3"), ([(8, 4)], "8 to 12 of 10"), ([(2, 4), (5, 4)], "not behind token 6")],
)
def test_spans_that_do_not_fit_are_refused(spans: list[tuple[int, int]], messages: str) -> None:
    with pytest.raises(ValueError, match=messages):
        plugin_module("positions").positions(10, spans, [(2, 2)] * len(spans))


def test_a_request_has_the_bytes_of_each_picture_once() -> None:
    sender = PictureSender(JsonHttp(None), inline=True)
    first, second = PlacedPicture(1, 4, picture(1)), PlacedPicture(6, 4, picture(2))
    made = GenerateRequest(**sender.fields([first], [replace(first, position=3), second], []))
    assert made.pictures is None
    assert made.image_data == [
        [inline_picture(first.ref, first.picture.data)],
        [inline_picture(replace(first, position=3).ref, None), inline_picture(second.ref, second.picture.data)],
        [],
    ]
    assert sender.sent == 2
    assert sender.fields([], []) == {}
    assert sender.fields([second], batch=False)["image_data"] == [inline_picture(second.ref, second.picture.data)]


class Scores:
    """A connection to a server that gives every token the log-probability `of` its request."""

    def __init__(self, of: Callable[[Mapping[str, Any]], float], read: int = 0) -> None:
        self._of, self._read = of, read

    async def call(self, method: str, url: str, body: GenerateRequest, timeout_s: float) -> Any:
        assert body.input_ids is not None
        assert body.logprob_start_len is not None
        entries = [[None, 0, None], *[[self._of(body), 0, None]] * (len(body.input_ids) - body.logprob_start_len - 1)]
        read = len(body.input_ids) + self._read
        return {"meta_info": {"input_token_logprobs": entries, "prompt_tokens": read}}


def client_of(scores: Scores) -> GenerationServerClient:
    http: Any = scores
    return GenerationServerClient(http, "http://server", PictureSender(http, inline=True))


async def fault(scores: Scores, folder: Path) -> str:
    return await fault_in_pictures(client_of(scores), folder, vocabulary=40, context=64, timeout_s=9.0)


async def test_a_server_that_looks_at_no_picture_is_found_at_its_start(vlm_folder: Callable[[str], Path]) -> None:
    folder = vlm_folder("qwen2_vl")
    messages = await fault(Scores(lambda body: -2.0), folder)
    assert "does not look at pictures; use generation.backend=embedded, or model.vision=none" in messages
    assert not await fault(Scores(lambda body: -float(len(str(body.image_data)))), folder)


async def test_a_server_that_reads_another_number_of_prompt_tokens_is_refused() -> None:
    shown = [PlacedPicture(1, 4, picture(1))]
    for read in (0, 3):
        client = client_of(Scores(lambda body: -2.0, read))
        if not read:
            assert await client.prompt_logprobs(range(9), 6, timeout_s=9.0, pictures=shown) == [-2.0, -2.0]
            continue
        with pytest.raises(MalformedReply, match="sent 9 prompt tokens and read 12: its ids are not the run's"):
            await client.prompt_logprobs(range(9), 6, timeout_s=9.0, pictures=shown)


def config_of(folder: Path, vision: VisionMode = VisionMode.train, urls: Sequence[str] = ()) -> ExperimentConfig:
    config = ExperimentConfig()
    config.model.path, config.model.vision = str(folder), vision
    config.generation.backend, config.generation.sglang.urls = "sglang", list(urls)
    return config


def described(tmp_path: Path, kind: str) -> Path:
    folder = tmp_path / kind
    folder.mkdir()
    content = {"model_type": kind, "vision_config": {}, "image_token_id": 7, "text_config": {"vocab_size": 17}}
    content["text_config"]["max_position_embeddings"] = 256
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_only_families_that_were_compared_show_pictures_to_sglang(tmp_path: Path) -> None:
    known, unknown = described(tmp_path, "qwen2_5_vl"), described(tmp_path, "gemma3")
    assert pictures_taken(config_of(known)) is not None
    assert pictures_taken(config_of(unknown)) is None
    assert pictures_taken(config_of(known, VisionMode.none)) is None
    assert pictures_taken(config_of(known, urls=["http://127.0.0.1:1"])) is None, "somebody else's has no plug-in"
    from_memory = config_of(known)
    from_memory.manager.weight_transport = "tensor"
    assert pictures_taken(from_memory) is None


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl", "glm4v"])
def test_what_sglang_would_see_otherwise_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    def messages() -> list[str]:
        return [each for each in check(config) if "earlier versions" in each or "which SGLang reads" in each]

    config = config_of(described(tmp_path, kind))
    config.generation.sglang.env = {"SGLANG_VLM_CACHE_SIZE_MB": "100"}
    *lacks, kept = messages()
    assert kept.startswith("generation.sglang.env.SGLANG_VLM_CACHE_SIZE_MB='100': SGLang would show")
    if kind == "glm4v":
        assert not lacks
        return
    name, at, value = {
        "qwen2_vl": ("vision_config.in_chans", "vision_config", {"in_chans": 3}),
        "qwen3_vl": (
            "text_config.rope_parameters.mrope_interleaved",
            "text_config",
            {"rope_scaling": {"mrope_interleaved": True}},
        ),
    }[kind]
    (lack,) = lacks
    assert f"its config.json has no {name}, which SGLang reads of {kind}" in lack
    file = Path(str(config.model.path)) / "config.json"
    content = json.loads(file.read_text())
    content[at] |= value
    file.write_text(json.dumps(content))
    config.model.vision = VisionMode.freeze
    assert messages() == []


@pytest.fixture
def ports() -> Any:
    block = reserve_ports("127.0.0.1")
    yield block
    block.release()


def test_a_server_reads_pictures_in_by_the_plug_in_and_keeps_none_of_an_older_tower(
    tmp_path: Path, ports: PortBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/inherited")

    def env(folder: Path, vision: VisionMode, own: dict[str, str] | None = None) -> Mapping[str, str]:
        config = config_of(folder, vision)
        config.generation.sglang.env = own or {}
        return build_command(
            config, model_dir=folder, ports=ports, device="cpu", secrets_file=None, scratch=tmp_path
        ).env

    folder = described(tmp_path, "qwen3_vl")
    trained = env(folder, VisionMode.train)
    assert trained["SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"] == "asyncrl_pictures"
    assert trained["PYTHONPATH"] == f"{PLUGIN}{os.pathsep}/inherited"
    assert trained["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    assert env(folder, VisionMode.train, {"PYTHONPATH": "/own"})["PYTHONPATH"] == f"{PLUGIN}{os.pathsep}/own"
    assert "SGLANG_VLM_CACHE_SIZE_MB" not in env(folder, VisionMode.freeze)
    for other in (env(folder, VisionMode.none), env(described(tmp_path, "llava"), VisionMode.train)):
        assert not {"SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE", "PYTHONPATH"} & other.keys()
