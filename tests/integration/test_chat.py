"""Chat over the embedded engine and real sockets: what is recorded is what was sampled, and what the trainer scores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from asyncrl.api import GenerationRequest, Prompt, SamplingParams
from asyncrl.chat.episode_client import EpisodeClient
from asyncrl.chat.parsers import parser
from asyncrl.chat.template import ChatFormat
from asyncrl.data.chat_template import ChatTemplate
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.stop_strings import kept_tokens
from asyncrl.data.tokenizers import ChatTokenizer, load_tokenizer
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.server import serve
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.messages import LostServersReply, Route, RouteRequest
from asyncrl.rollout.generation_servers import ServerCapabilities
from asyncrl.rollout.rollout_client import RolloutClient

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """A token for each byte, and the control tokens of ChatML."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    folder: Path = tmp_path_factory.mktemp("bytes")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>").save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def model(tokenizer: ChatTokenizer) -> Qwen2ForCausalLM:
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen2ForCausalLM(config).eval()


class OneServer:
    """The manager of a run with one server, as a `RolloutClient` asks it."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def schedule(self, request: RouteRequest, timeout_s: float) -> Route:
        return Route(self._url, 0)

    def release(self, request_id: str) -> None:
        """Nothing is kept."""

    async def lost_servers(self, after: int, timeout_s: float) -> LostServersReply:
        return await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def policy_of(
    model: Qwen2ForCausalLM, tokenizer: ChatTokenizer, *, servers_stop: bool = True, **settings: Any
) -> AsyncIterator[RolloutClient]:
    """A client of a server of `model`, which has a tokenizer where `servers_stop`."""
    engine = GenerationEngine(model, max_running_requests=8, detokenize=tokenizer.decode_all if servers_stop else None)
    engine.start()
    server = await serve(engine)
    manager = cast(ManagerClient, OneServer(server.url))
    options = {"security": None, "max_concurrent": 8, "request_timeout_s": 60.0, **settings}
    try:
        can = ServerCapabilities(decode=tokenizer.decode_all, find_stops=servers_stop)
        async with RolloutClient(manager, can, **options) as client:
            yield client
    finally:
        await server.close()
        engine.close()


def prompt_of(tokenizer: ChatTokenizer, seed: int = 5) -> tuple[Prompt, ChatFormat]:
    chat = ChatFormat(PromptFormat(tokenizer, ChatTemplate(CHATML, {})), parser("hermes"))
    sampling = SamplingParams(max_new_tokens=40, temperature=TEMPERATURE, seed=seed)
    ids = tuple(chat.begin([{"role": "user", "content": "2+2?"}]).ids)
    return Prompt("p", 0, {"prompt": "2+2?"}, ids, 1, sampling), chat


def scored(model: Qwen2ForCausalLM, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """Log-probabilities of `tokens` after the first by transformers itself, at the sampling's temperature."""
    with torch.inference_mode():
        logits = model(torch.tensor([list(tokens)])).logits[0, :-1].double() / TEMPERATURE
    rows = torch.arange(len(tokens) - 1)
    return np.asarray(logits.log_softmax(-1)[rows, torch.tensor(list(tokens[1:]))].numpy())


async def test_a_conversations_log_probabilities_are_those_of_its_sample(
    model: Qwen2ForCausalLM, tokenizer: ChatTokenizer
) -> None:
    """Three turns, answers cut off among them: each sampled token was drawn after the tokens that stand before it."""
    prompt, chat = prompt_of(tokenizer)
    async with policy_of(model, tokenizer, new_tokens_per_chunk=7) as policy:
        client = EpisodeClient(policy, prompt, chat)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "2+2?"}]
        for text in ("sure? <|im_end|>", "\u4f60\u597d", ""):
            reply = await client.chat(messages)
            messages += [reply.message, {"role": "user", "content": text}]
    (sample,) = client.samples(1.0)
    generated = sample.loss_mask[1:].astype(bool)
    assert generated.sum() > 30
    expected = scored(model, sample.tokens.tolist())
    np.testing.assert_allclose(sample.behave_logprobs[1:][generated], expected[generated], rtol=0, atol=1e-4)


async def test_the_same_token_ends_an_answer_at_a_stop_string_wherever_it_is_looked_for(
    model: Qwen2ForCausalLM, tokenizer: ChatTokenizer
) -> None:
    prompt, _ = prompt_of(tokenizer)
    sampling = replace(prompt.sampling, max_new_tokens=120, stop_token_ids=())
    request = GenerationRequest("q", prompt.input_ids, 4, sampling)
    async with policy_of(model, tokenizer) as policy:
        whole = (await policy.generate(request)).completions
    text = tokenizer.decode_all(whole[0].token_ids)
    readable = [text[at : at + 2] for at in range(5, len(text) - 2) if "\ufffd" not in text[at : at + 2]]
    stop = ("never said", readable[0])
    stopping = replace(request, sampling=replace(sampling, stop=stop))
    expected = [made.token_ids[: kept_tokens(made.token_ids, stop, tokenizer.decode_all)] for made in whole]
    assert len(expected[0]) < len(whole[0].token_ids)
    for settings in (
        {"servers_stop": True},
        {"servers_stop": False},
        {"servers_stop": True, "new_tokens_per_chunk": 5},
    ):
        async with policy_of(model, tokenizer, **settings) as policy:
            made = (await policy.generate(stopping)).completions
        assert [each.token_ids for each in made] == expected
        assert made[0].finish_reason == "stop"
