"""Calls with token ids, as in vLLM, which `verifiers` uses: tokenize, and generate from ids."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from itertools import takewhile
from typing import Final

import msgspec

from asyncrl.api.chat import Message, ToolSchema
from asyncrl.api.generation import GenerationRequest, GenerationResult, SamplingParams
from asyncrl.inference.openai import chat_completions
from asyncrl.inference.openai.api_call import MAX_ANSWERS, ApiCall, Json, SupportedParameters, invalid, sampling_of

PromptIds = Callable[..., tuple[int, ...]]
"""`ChatClient.prompt_ids`: the ids that the policy continues."""


class Tokenize(msgspec.Struct):
    """A conversation to be rendered: up to the place where the policy continues, or without the beginning of an
    answer.
    """

    messages: list[Json]
    tools: list[Json] = msgspec.field(default_factory=list)
    add_generation_prompt: bool = True


class Generate(msgspec.Struct):
    """A request to continue ids."""

    token_ids: list[int]
    sampling_params: Json = msgspec.field(default_factory=dict)


class Sampling(msgspec.Struct):
    """The sampling parameters that are used."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None


class ChatTokens(chat_completions.Body):
    """A chat completion that also has the prompt's ids."""

    tokens: list[int] = msgspec.field(default_factory=list)


_TOKENIZE: Final = SupportedParameters(
    Tokenize,
    ignored=frozenset({"model", "return_token_strs", "add_special_tokens"}),
    neutral={"continue_final_message": (False,), "chat_template_kwargs": ({},)},
    hints={
        "prompt": "give messages",
        "chat_template_kwargs": chat_completions.SURFACE.hints["chat_template_kwargs"],
    },
)
_GENERATE: Final = SupportedParameters(
    Generate,
    ignored=frozenset({"model", "request_id", "stream_options", "cache_salt", "priority"}),
    neutral={"stream": (False,), "features": ({},)},
)
_SAMPLING: Final = SupportedParameters(
    Sampling,
    ignored=frozenset({"logprobs", "seed", "output_kind", "routed_experts_prompt_start"})
    | {"detokenize", "skip_special_tokens", "spaces_between_special_tokens"},  # of text, which the answer lacks
    neutral={
        name: chat_completions.SURFACE.neutral[name]
        for name in (
            *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
            *("min_tokens", "ignore_eos", "prompt_logprobs", "include_stop_str_in_output"),
        )
    },
)
_CHAT: Final = SupportedParameters(
    ChatTokens,
    chat_completions.SURFACE.ignored,
    chat_completions.SURFACE.neutral,
    chat_completions.SURFACE.hints,
)


class ChatFromTokens(chat_completions.ChatCompletions):
    """Chat completions of a client that sends the prompt's ids besides the messages.

    The session's records determine the ids of the messages. A client that sends others gets an error, since the policy
    would continue another text than the client expects.
    """

    def __init__(self, prompt_ids: PromptIds) -> None:
        self._prompt_ids = prompt_ids

    def read(self, body: bytes) -> ApiCall:
        asked = _CHAT.read(body)
        call = chat_completions.call_of(asked)
        ids = self._prompt_ids(call.messages, tools=call.tools)
        if list(ids) != asked.tokens:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(ids, asked.tokens, strict=False))
            where = f"position {sum(1 for _ in same)}"
            raise invalid(
                "tokens", f"not the ids of these messages, which differ from {where} on; ask /tokenize for them"
            )
        return call


def read_tokenize(body: bytes) -> tuple[list[Message], list[ToolSchema], bool]:
    """Return the messages and tools to be rendered, and whether an answer is to follow.

    Raises:
        ApiError: the request is invalid.
    """
    asked = _TOKENIZE.read(body)
    messages, tools = chat_completions.messages_of(asked.messages), chat_completions.tools_of(asked.tools)
    return messages, tools, asked.add_generation_prompt


def read_generate(body: bytes, session: SamplingParams) -> GenerationRequest:
    """Return the request for continuations of ids, with the sampling of `session` for parameters that it lacks.

    Raises:
        ApiError: the request is invalid.
    """
    asked = _GENERATE.read(body)
    if not asked.token_ids or min(asked.token_ids) < 0:
        raise invalid("token_ids", "give at least one id, none negative")
    own = _SAMPLING.read(msgspec.json.encode(asked.sampling_params))
    if not 1 <= own.n <= MAX_ANSWERS:
        raise invalid("sampling_params.n", f"{own.n} answers; ask for 1 to {MAX_ANSWERS}")
    sampling = sampling_of(
        max_new_tokens=own.max_tokens,
        temperature=own.temperature,
        top_p=own.top_p,
        top_k=own.top_k,
        min_p=own.min_p,
        stop=own.stop,
        stop_token_ids=None if own.stop_token_ids is None else tuple(own.stop_token_ids),
    )
    call = ApiCall("", (), sampling=sampling)
    return GenerationRequest(uuid.uuid4().hex, tuple(asked.token_ids), own.n, call.sampled_by(session))


def generated(result: GenerationResult) -> Json:
    """Return the answer to a request for continuations."""
    choices = [
        {
            "index": index,
            "token_ids": list(each.token_ids),
            "finish_reason": each.finish_reason.value,
            "logprobs": {"content": chat_completions.token_logprobs(each.token_ids, each.logprobs)},
        }
        for index, each in enumerate(result.completions)
    ]
    return {"request_id": result.request_id, "choices": choices}
