"""An endpoint over a policy of one rule, and the episodes that it serves."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.api import Completion, FinishReason, GenerationRequest, GenerationResult, Sample, SamplingParams
from asyncrl.api.chat import ChatFinish, ChatReply, Message, ToolCall, ToolSchema
from asyncrl.chat.parsers import Parsed
from asyncrl.chat.template import ChatFormat
from asyncrl.data.chat_template import ChatTemplate
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import load_tokenizer, special_tokens
from asyncrl.inference.openai.endpoint import Endpoint, Session

LONG = SamplingParams(max_new_tokens=64, temperature=0.7, seed=3)


CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class RulePolicy:
    """Calls every tool once, with 2 for each argument; else says what `answer` is. Each answer is four ids."""

    def __init__(self, answer: str = "The answer is 4.", reasoning: str | None = None) -> None:
        self.answer, self.reasoning = answer, reasoning
        self.asked: list[dict[str, Any]] = []
        self.counts = Counter[str]()
        self.recorded: list[Completion] = []
        self.begun = self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.finish: ChatFinish | None = None
        self.max_context = 4096

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] = (),
        sampling: SamplingParams | None = None,
        tool_choice: str = "auto",
        n: int = 1,
        continue_last: bool = False,
    ) -> ChatReply:
        self.asked.append({"messages": list(messages), "tools": list(tools), "sampling": sampling} | {"n": n})
        await self._wait()
        first, *others = [self._reply(messages, tools if tool_choice == "auto" else (), i) for i in range(n)]
        return replace(first, alternatives=tuple(others))

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.asked.append({"request": request})
        await self._wait()
        return GenerationResult(request.request_id, tuple(self._completion(i) for i in range(request.n)))

    def prompt_ids(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        return tuple(range(len(messages) + len(tools)))

    def shown_ids(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        return self.prompt_ids(messages, tools=tools)[:-1]

    def samples(self, reward: float = 0.0) -> list[Sample]:
        raise NotImplementedError

    def forget(self, answer: Completion) -> None:
        self.recorded.remove(answer)

    def leave_untrained(self, answers: Sequence[Completion]) -> None:
        raise NotImplementedError

    def count(self, name: str, number: int) -> None:
        self.counts[name] += number

    async def _wait(self) -> None:
        self.begun += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error

    def _completion(self, index: int) -> Completion:
        ids = [11 + index, 12, 13, 14]
        completion = Completion(ids, [-0.1, -0.2, -0.3, -0.4], [7] * 4, FinishReason.stop, cached_tokens=1 + index)
        self.recorded.append(completion)
        return completion

    def _reply(self, messages: Sequence[Message], tools: Sequence[ToolSchema], index: int) -> ChatReply:
        calls: tuple[ToolCall, ...] = ()
        if tools and not any(message["role"] == "tool" for message in messages):
            calls = tuple(_call_of(tool["function"], number) for number, tool in enumerate(tools))
        content = "" if calls else self.answer
        finish = self.finish or (ChatFinish.tool_calls if calls else ChatFinish.stop)
        message = {"role": "assistant", "content": content}
        prompt = self.prompt_ids(messages, tools=tools)
        return ChatReply(message, content, self.reasoning, calls, 0, finish, prompt, self._completion(index))


def _call_of(function: Mapping[str, Any], number: int) -> ToolCall:
    values = {"integer": 2, "string": "x y"}
    properties = function["parameters"].get("properties", {})
    arguments = {name: values.get(schema.get("type"), 2) for name, schema in properties.items()}
    return ToolCall(f"call{number}", function["name"], arguments)


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    """An endpoint whose streams say every 50 ms that they wait."""
    served = Endpoint(keep_alive_s=0.05)
    yield served
    await served.close()


@pytest.fixture
def policy() -> RulePolicy:
    return RulePolicy()


@pytest.fixture
def make_policy() -> Callable[..., RulePolicy]:
    return RulePolicy


@pytest_asyncio.fixture
async def session(endpoint: Endpoint, policy: RulePolicy) -> Session:
    return await endpoint.open(policy, LONG)


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits until a condition holds that events in this loop bring about."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(300):
            while not condition():  # noqa: ASYNC110 - what happens is the other end's
                await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def endpoint_in_thread() -> Iterator[Session]:
    """A session of an endpoint in a thread of its own, for clients that block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def begin() -> tuple[Endpoint, Session]:
        served = Endpoint()
        return served, await served.open(RulePolicy(), LONG)

    served, opened = asyncio.run_coroutine_threadsafe(begin(), loop).result(60)
    yield opened
    asyncio.run_coroutine_threadsafe(served.close(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


class Calls:
    """A call of `look` for each `a` of an answer's text."""

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> Parsed:
        known = tools and tools[0]["function"]["parameters"].get("properties")
        odd = {} if known else {"\u00e9": [1.0, None]}
        calls = [ToolCall(str(at), "look", {"at": at, **odd}) for at in range(text.count("a"))]
        return Parsed(text.replace("a", "") if tools else text, None, tuple(calls if tools else ()), 0)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer for ChatML, with the tokens that Qwen3's has."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(
        [CHATML, "Are you sure? 2 + 2 is more than that. user assistant tool system the answer is"], trainer
    )
    pairs = [f"<{end}{name}>" for name in ("think", "tool_call", "tool_response") for end in ("", "/")]
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in pairs])
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chat(tokenizer_folder: Path) -> ChatFormat:
    template = ChatTemplate(CHATML, special_tokens(tokenizer_folder))
    return ChatFormat(PromptFormat(load_tokenizer(tokenizer_folder), template), Calls())
