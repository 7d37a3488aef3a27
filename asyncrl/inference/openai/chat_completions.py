"""OpenAI's chat completions and its chat messages, to which all APIs are translated, and vLLM's calls with token ids:
`/tokenize`, and generation from ids, which `verifiers` uses.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, Final, Literal

import msgspec

from asyncrl.api.chat import ChatFinish, ChatReply, Message, ToolCall, ToolSchema
from asyncrl.api.generation import GenerationRequest, GenerationResult, SamplingParams
from asyncrl.api.picture import PictureError
from asyncrl.data.picture_parts import PICTURE_TYPES, Content, content_of
from asyncrl.inference.openai.api_call import (
    DONE,
    IGNORED_BY_OPENAI,
    MAX_ANSWERS,
    ApiCall,
    ApiError,
    Json,
    SupportedParameters,
    answer_format,
    convert,
    frame,
    function_tool,
    invalid,
    json_arguments,
    offered,
    pieces,
    refused,
    sampling_of,
    tool_choice_of,
)


class Function(msgspec.Struct):
    """A function that may be called; the same in both of OpenAI's APIs."""

    name: str
    description: str | None = None
    parameters: Json | None = None


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _ToolCall(msgspec.Struct):
    id: str
    function: _CalledFunction
    type: Literal["function"] = "function"


class _Message(msgspec.Struct):
    role: str
    content: str | list[Json] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Json | None = None
    audio: Json | None = None


def tools_of(given: Sequence[Json]) -> list[ToolSchema]:
    """Return the functions in a request's `tools`.

    Raises:
        ApiError: a tool is of another kind.
    """
    tools = []
    for where, tool in offered(given):
        if tool.get("type") != "function":
            raise refused(f"{where}.type", tool.get("type"), "functions alone are supported")
        found = convert(tool.get("function"), Function, f"{where}.function")
        tools.append(function_tool(found.name, found.description, found.parameters))
    return tools


def messages_of(given: Sequence[Json]) -> list[Message]:
    """Return a request's messages with the fields that have a meaning here.

    Raises:
        ApiError: a role or content that the policy does not accept.
    """
    if not given:
        raise invalid("messages", "empty; give at least one message")
    return [_message(each, f"messages[{number}]") for number, each in enumerate(given)]


def _message(given: Json, where: str) -> Message:
    found = convert(given, _Message, where)
    role = "system" if found.role == "developer" else found.role
    if role not in ("system", "user", "assistant", "tool"):
        raise refused(f"{where}.role", found.role, "system, developer, user, assistant and tool are known")
    for name in ("function_call", "audio"):
        if value := getattr(found, name):
            raise refused(f"{where}.{name}", value, "not supported; functions are called by tool_calls")
    read = seen_of if role in ("user", "tool") else text_of
    message: Json = {"role": role, "content": read(found.content, f"{where}.content", ("text",))}
    if found.name is not None:
        message["name"] = found.name
    if role == "tool":
        if found.tool_call_id is None:
            raise invalid(f"{where}.tool_call_id", "missing; a tool's message names the call that it answers")
        message["tool_call_id"] = found.tool_call_id
    elif role == "assistant":
        if reasoning := found.reasoning_content or found.reasoning:
            message["reasoning_content"] = reasoning
        if found.tool_calls:
            message["tool_calls"] = [
                assistant_call(call.id, call.function.name, call.function.arguments, f"{where}.tool_calls[{number}]")
                for number, call in enumerate(found.tool_calls)
            ]
    return message


def assistant_call(call_id: str, name: str, arguments: str, where: str) -> Json:
    """Return a call within an assistant's message, in OpenAI's chat form."""
    arguments = json_arguments(arguments, f"{where}.function.arguments")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_of(content: str | Sequence[Json] | None, where: str, kinds: Sequence[str]) -> str:
    """Return the text of a message's content: the content itself, or its parts of one of `kinds`, joined.

    Raises:
        ApiError: a part is of another kind, such as an image, audio or a file.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for number, part in enumerate(content):
        if part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise refused(f"{where}[{number}].type", part.get("type"), "the policy reads text")
    return "".join(part["text"] for part in content)


def seen_of(content: str | Sequence[Json] | None, where: str, kinds: Sequence[str]) -> Content:
    """Return a message's content with its pictures: text, or parts that are text of one of `kinds` or pictures.

    Raises:
        ApiError: a part is of another kind, or a picture cannot be used; nothing is fetched from URLs.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Json] = []
    for number, part in enumerate(content):
        if part.get("type") in PICTURE_TYPES:
            try:
                found = content_of([part])
            except PictureError as error:
                raise invalid(f"{where}[{number}]", str(error)) from None
            parts += found if isinstance(found, list) else ()
        elif part.get("type") in kinds and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise refused(f"{where}[{number}].type", part.get("type"), "the policy reads text and pictures")
    return content_of(parts)


def message_json(reply: ChatReply) -> Json:
    """Return the reply as a message of this API."""
    message: Json = {"role": "assistant", "content": None if reply.tool_calls and not reply.content else reply.content}
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_of(call)}}
            for call in reply.tool_calls
        ]
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    return message


def arguments_of(call: ToolCall) -> str:
    """Return the arguments of a call in these APIs' form: JSON within a string."""
    return msgspec.json.encode(dict(call.arguments)).decode()


def finished_at_length(reply: ChatReply) -> bool:
    """True if the answer was cut off."""
    return reply.finish_reason == ChatFinish.length


def token_logprobs(token_ids: Sequence[int], logprobs: Sequence[float]) -> list[Json]:
    """Return each token's log-probability; tokens are named by id, as in vLLM."""
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]


class StreamOptions(msgspec.Struct):
    """Content of a stream besides the answer."""

    include_usage: bool = False


class Sampling(msgspec.Struct):
    """The sampling parameters that are used; the second block is vLLM's and SGLang's."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    stop: str | list[str] | None = None

    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: list[int] | None = None

    def checked(self, most: int | None) -> Json:
        """Return the parameters by the names of `SamplingParams`, with `most` as the longest answer.

        Raises:
            ApiError: a value with which sampling is impossible.
        """
        return sampling_of(
            max_new_tokens=most,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=self.stop,
            stop_token_ids=None if self.stop_token_ids is None else tuple(self.stop_token_ids),
        )


class Body(Sampling, kw_only=True):
    """The parameters that are used; the second block is vLLM's and SGLang's."""

    messages: list[Json]
    model: str
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    tools: list[Json] = msgspec.field(default_factory=list)
    tool_choice: str | Json = "auto"
    logprobs: bool = False
    response_format: Json = msgspec.field(default_factory=dict)

    return_token_ids: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False


OFF: Final = (False, 0)
SURFACE: Final = SupportedParameters(
    Body,
    ignored=IGNORED_BY_OPENAI
    | {"metadata", "prediction", "seed", "reasoning_effort", "verbosity", "return_tokens_as_token_ids"}
    | {"cache_salt", "priority", "request_id", "parallel_tool_calls"},
    neutral={
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "top_logprobs": (0,),
        "modalities": (["text"],),
        "functions": ([],),
        "function_call": ("auto", "none"),
        "min_tokens": (0,),
        "ignore_eos": OFF,
        "echo": OFF,
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "include_stop_str_in_output": OFF,
        "chat_template_kwargs": ({},),
        "use_beam_search": OFF,
        "prompt_logprobs": (0,),
    },
    hints={
        "chat_template_kwargs": "a run renders all its prompts alike: set dataset.chat_template_args",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "top_logprobs": "log-probabilities of the sampled tokens alone are there (logprobs)",
        "audio": "the policy speaks text",
        "web_search_options": "give it a tool",
        "moderation": "leave it out",
    },
)


class ChatCompletions:
    """Reader and writer of OpenAI's chat completions API."""

    def read(self, body: bytes) -> ApiCall:
        return call_of(SURFACE.read(body))

    def answer(self, call: ApiCall, replies: Sequence[ChatReply]) -> Json:
        body: Body = call.body
        choices = [
            {
                "index": index,
                "finish_reason": reply.finish_reason.value,
                "message": {"refusal": None, **message_json(reply)},
                "logprobs": _logprobs(reply) if body.logprobs else None,
            }
            | ({"token_ids": list(reply.completion.token_ids)} if body.return_token_ids else {})
            for index, reply in enumerate(replies)
        ]
        return {**_head(call, "chat.completion"), **_prompt_ids(body, replies), "choices": choices} | {
            "usage": _usage(replies)
        }

    def events(self, call: ApiCall, replies: Sequence[ChatReply]) -> Iterator[bytes]:
        body: Body = call.body
        head = _head(call, "chat.completion.chunk")

        def chunk(index: int, delta: Json, finish: str | None = None, **extra: Any) -> bytes:
            choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None, **extra}
            return frame({**head, "choices": [choice]})

        for index, reply in enumerate(replies):
            message = message_json(reply)
            extra: Json = {"logprobs": _logprobs(reply)} if body.logprobs else {}
            if body.return_token_ids:
                extra["token_ids"] = list(reply.completion.token_ids)
            yield chunk(index, {"role": "assistant", "content": ""}, **extra)
            if reasoning := message.get("reasoning_content"):
                yield chunk(index, {"reasoning_content": reasoning})
            for piece in pieces(message.get("content") or ""):
                yield chunk(index, {"content": piece})
            for number, made in enumerate(message.get("tool_calls", ())):
                function = made["function"]
                opened = {**made, "index": number, "function": {"name": function["name"], "arguments": ""}}
                yield chunk(index, {"tool_calls": [opened]})
                for piece in pieces(function["arguments"]):
                    yield chunk(index, {"tool_calls": [{"index": number, "function": {"arguments": piece}}]})
            yield chunk(index, {}, reply.finish_reason.value)
        if body.stream_options.include_usage:
            yield frame({**head, **_prompt_ids(body, replies), "choices": [], "usage": _usage(replies)})
        yield DONE

    def error(self, error: ApiError) -> Json:
        return error.openai()

    def error_event(self, error: ApiError) -> bytes:
        return frame(error.openai())


def call_of(body: Body) -> ApiCall:
    """Return the call in `body`.

    Raises:
        ApiError: it asks for something that is not supported.
    """
    if not 1 <= body.n <= MAX_ANSWERS:
        raise invalid("n", f"{body.n} answers; ask for 1 to {MAX_ANSWERS}")
    tools = tools_of(body.tools)
    choice, wants_call = tool_choice_of(body.tool_choice)
    if body.add_generation_prompt == body.continue_final_message:
        raise refused(
            "add_generation_prompt",
            body.add_generation_prompt,
            "an answer either begins (the default) or continues the last message (continue_final_message=True with "
            "add_generation_prompt=False)",
        )
    answer_format("response_format", body.response_format)
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    sampling = body.checked(most)
    asked = body.model, messages_of(body.messages), tools, choice, sampling
    left_out = len(body.tools) - len(tools)
    return ApiCall(*asked, body.n, body.stream, body.continue_final_message, body, wants_call, left_out)


def _head(call: ApiCall, kind: str) -> Json:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": call.model}


def _prompt_ids(body: Body, replies: Sequence[ChatReply]) -> Json:
    return {"prompt_token_ids": list(replies[0].prompt_ids)} if body.return_token_ids else {}


def _usage(replies: Sequence[ChatReply]) -> Json:
    prompt, made = len(replies[0].prompt_ids), sum(len(reply.completion.token_ids) for reply in replies)
    cached = min(reply.completion.cached_tokens for reply in replies)  # the prompt counts once
    return {
        "prompt_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens": made,
        "total_tokens": prompt + made,
    }


def _logprobs(reply: ChatReply) -> Json:
    """Return the log-probabilities of the sampled tokens. Tokens are named by their ids, as the text of a single token
    need not be valid text.
    """
    answer = reply.completion
    return {"content": token_logprobs(answer.token_ids, answer.logprobs), "refusal": None}


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
    model: str = ""
    sampling_params: Json = msgspec.field(default_factory=dict)


class ChatTokens(Body):
    """A chat completion that also has the prompt's ids."""

    tokens: list[int] = msgspec.field(default_factory=list)


_TOKENIZE: Final = SupportedParameters(
    Tokenize,
    ignored=frozenset({"model", "return_token_strs", "add_special_tokens"}),
    neutral={"continue_final_message": (False,), "chat_template_kwargs": ({},)},
    hints={
        "prompt": "give messages",
        "chat_template_kwargs": SURFACE.hints["chat_template_kwargs"],
    },
)
_GENERATE: Final = SupportedParameters(
    Generate,
    ignored=frozenset({"request_id", "stream_options", "cache_salt", "priority"}),
    neutral={"stream": (False,), "features": ({},)},
)
_SAMPLING: Final = SupportedParameters(
    Sampling,
    ignored=frozenset({"logprobs", "seed", "output_kind", "routed_experts_prompt_start"})
    | {"detokenize", "skip_special_tokens", "spaces_between_special_tokens"},  # of text, which the answer lacks
    neutral={
        name: SURFACE.neutral[name]
        for name in (
            *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
            *("min_tokens", "ignore_eos", "prompt_logprobs", "include_stop_str_in_output"),
        )
    },
)
_CHAT: Final = SupportedParameters(
    ChatTokens,
    SURFACE.ignored,
    SURFACE.neutral,
    SURFACE.hints,
)


class ChatFromTokens(ChatCompletions):
    """Chat completions of a client that sends the prompt's ids besides the messages.

    The session's records determine the ids of the messages. A client that sends others gets an error, since the policy
    would continue another text than the client expects.
    """

    def __init__(self, prompt_ids: PromptIds) -> None:
        self._prompt_ids = prompt_ids

    def read(self, body: bytes) -> ApiCall:
        asked = _CHAT.read(body)
        call = call_of(asked)
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
    messages, tools = messages_of(asked.messages), tools_of(asked.tools)
    return messages, tools, asked.add_generation_prompt


def read_generate(body: bytes, session: SamplingParams) -> tuple[GenerationRequest, str]:
    """Return the request for continuations of ids, with the sampling of `session` for parameters that it lacks, and the
    model that it names.

    Raises:
        ApiError: the request is invalid.
    """
    asked = _GENERATE.read(body)
    if not asked.token_ids or min(asked.token_ids) < 0:
        raise invalid("token_ids", "give at least one id, none negative")
    own = _SAMPLING.read(msgspec.json.encode(asked.sampling_params))
    if not 1 <= own.n <= MAX_ANSWERS:
        raise invalid("sampling_params.n", f"{own.n} answers; ask for 1 to {MAX_ANSWERS}")
    call = ApiCall("", (), sampling=own.checked(own.max_tokens))
    request = GenerationRequest(uuid.uuid4().hex, tuple(asked.token_ids), own.n, call.sampled_by(session))
    return request, asked.model


def generated(result: GenerationResult) -> Json:
    """Return the answer to a request for continuations."""
    choices = [
        {
            "index": index,
            "token_ids": list(each.token_ids),
            "finish_reason": each.finish_reason.value,
            "logprobs": {"content": token_logprobs(each.token_ids, each.logprobs)},
        }
        for index, each in enumerate(result.completions)
    ]
    return {"request_id": result.request_id, "choices": choices}
