"""Pictures through the endpoint, by OpenAI's and Anthropic's own clients, in front of a real model's picture rules."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from asyncrl.api import Completion, FinishReason, GenerationRequest, GenerationResult, Prompt, SamplingParams
from asyncrl.api.picture import Picture
from asyncrl.chat.episode_client import EpisodeClient
from asyncrl.chat.parsers import parser
from asyncrl.chat.template import ChatFormat
from asyncrl.data.chat_template import ChatTemplate
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import load_tokenizer, special_tokens, template_source
from asyncrl.inference.openai.endpoint import Endpoint
from asyncrl.models.picture_rules import picture_rules

ONE, TWO = (Picture.from_array(np.random.default_rng(seed).integers(0, 256, (56, 84, 3), np.uint8)) for seed in (1, 2))


@dataclass
class Policy:
    """Says "red" and ends."""

    turns: list[int]
    asked: list[GenerationRequest] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.asked.append(request)
        count = len(self.turns)
        answer = Completion(self.turns, [-0.5] * count, [0] * count, FinishReason.stop)
        return GenerationResult(request.request_id, (answer,) * request.n)


@pytest.fixture(scope="module")
def form(vlm_folder: Callable[[str], Path]) -> Any:
    folder = vlm_folder("qwen2_vl")
    template = template_source(folder)
    assert template is not None
    rules = picture_rules(folder)
    assert rules is not None
    yield PromptFormat(load_tokenizer(folder), ChatTemplate(template, special_tokens(folder)), pictures=rules)
    rules.close()


def client_of(form: PromptFormat) -> tuple[EpisodeClient, Policy]:
    chat = ChatFormat(form, parser("none"))
    policy = Policy([*form.tokenizer.encode("red"), form.tokenizer.eos_token_id])
    prompt = Prompt("p", 0, {}, (1,), 1, SamplingParams(max_new_tokens=8, seed=3))
    return EpisodeClient(policy, prompt, chat), policy


def url(picture: Picture) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": picture.data_url}}


def source(picture: Picture) -> dict[str, Any]:
    data = base64.b64encode(picture.data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def text(turns: str) -> dict[str, Any]:
    return {"type": "text", "text": turns}


async def test_each_api_records_what_a_native_agent_records(form: Any, endpoint: Endpoint) -> None:
    native, policy = client_of(form)
    talk: list[Any] = [{"role": "user", "content": [{"type": "image", "image": ONE}, text("how many?")]}]
    talk.append((await native.chat(talk)).message)
    talk.append({"role": "user", "content": [text("left"), {"type": "image", "image": TWO}]})
    await native.chat(talk)
    (expected,) = native.samples()
    assert [placed.picture for placed in expected.pictures] == [ONE, TWO]
    rows = policy.asked[1].pictures[0].length
    assert rows == 6  # of 28 x 28 pixels each, by Qwen2-VL's own rule

    for api in ("chat", "responses", "messages"):
        client, _ = client_of(form)
        session = await endpoint.open(client, SamplingParams(max_new_tokens=8, seed=3))
        if api == "messages":
            at = anthropic.AsyncAnthropic(base_url=session.root_url, api_key=session.api_key, max_retries=0)
            turns: list[Any] = [{"role": "user", "content": [source(ONE), text("how many?")]}]
            answer = await at.messages.create(model="m", max_tokens=8, messages=turns)
            turns += [{"role": "assistant", "content": answer.content}]
            turns += [{"role": "user", "content": [text("left"), source(TWO)]}]
            await at.messages.create(model="m", max_tokens=8, messages=turns)
        elif api == "chat":
            of_openai = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
            turns = [{"role": "user", "content": [url(ONE), text("how many?")]}]
            made = await of_openai.chat.completions.create(model="m", messages=turns)
            turns += [{"role": "assistant", "content": made.choices[0].message.content}]
            turns += [{"role": "user", "content": [text("left"), url(TWO)]}]
            await of_openai.chat.completions.create(model="m", messages=turns)
        else:
            of_openai = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)

            def shown(picture: Picture) -> dict[str, Any]:
                return {"type": "input_image", "image_url": picture.data_url, "detail": "auto"}

            asked = [{"role": "user", "content": [shown(ONE), {"type": "input_text", "text": "how many?"}]}]
            response = await of_openai.responses.create(model="m", input=asked)  # type: ignore[call-overload]
            asked = [{"role": "user", "content": [{"type": "input_text", "text": "left"}, shown(TWO)]}]
            await of_openai.responses.create(  # type: ignore[call-overload]
                model="m", input=asked, previous_response_id=response.id
            )
        (sample,) = client.samples()
        np.testing.assert_array_equal(sample.tokens, expected.tokens, err_msg=api)
        assert sample.pictures == expected.pictures, api
        session.close()


async def test_what_cannot_be_shown_is_refused_by_name(form: Any, endpoint: Endpoint) -> None:
    client, policy = client_of(form)
    session = await endpoint.open(client, SamplingParams(max_new_tokens=8, seed=3))
    at = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    for part, why in (
        ({"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}, "nothing is fetched"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "nothing is fetched"),
        ({"type": "image_url", "image_url": {"url": ONE.data_url[:90]}}, "damaged"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "reads text and pictures"),
    ):
        turns: Any = [{"role": "user", "content": [text("a"), part]}]
        with pytest.raises(openai.BadRequestError, match=why):
            await at.chat.completions.create(model="m", messages=turns)
    of_anthropic = anthropic.AsyncAnthropic(base_url=session.root_url, api_key=session.api_key, max_retries=0)
    away: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}]}]
    with pytest.raises(anthropic.BadRequestError, match="nothing is fetched"):
        await of_anthropic.messages.create(model="m", max_tokens=8, messages=away)
    assert not policy.asked
    session.close()


async def test_tools_results_with_pictures(form: Any, endpoint: Endpoint) -> None:
    client, policy = client_of(form)
    session = await endpoint.open(client, SamplingParams(max_new_tokens=8, seed=3))
    at = anthropic.AsyncAnthropic(base_url=session.root_url, api_key=session.api_key, max_retries=0)
    turns: Any = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [source(TWO)]}]},
    ]
    await at.messages.create(model="m", max_tokens=8, messages=turns)
    assert [placed.picture for placed in policy.asked[0].pictures] == [TWO]
    session.close()


async def test_a_model_that_takes_none_refuses_them(chat: ChatFormat, endpoint: Endpoint) -> None:
    policy = Policy([0])
    prompt = Prompt("p", 0, {}, (1,), 1, SamplingParams(max_new_tokens=8))
    client = EpisodeClient(policy, prompt, chat)
    session = await endpoint.open(client, prompt.sampling)
    at = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    turns: Any = [{"role": "user", "content": [url(ONE)]}]
    with pytest.raises(openai.BadRequestError, match="takes none"):
        await at.chat.completions.create(model="m", messages=turns)
    session.close()
