"""Stand-ins of four families of chat templates over one byte-level BPE tokenizer, and a policy that makes things up."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.api import Completion, FinishReason, GenerationRequest, GenerationResult, Prompt, SamplingParams
from asyncrl.chat.parsers import Parser, parser
from asyncrl.chat.template import ChatFormat
from asyncrl.data.chat_template import ChatTemplate
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import ChatTokenizer, load_tokenizer, special_tokens

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>")
SPECIAL += ("<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_TOOLS = """
{%- macro offered(tools) %}{{ 'Functions:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '\\n</tools>' }}{% endmacro %}"""
_SYSTEM = """
{%- if tools or messages[0].role == 'system' or default_system %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}{{ default_system }}{% endif %}
    {%- if tools %}{{ '\\n\\n' + offered(tools) }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}"""
_CALLS = """
{%- for call in message.tool_calls or [] %}
    {%- if (loop.first and message.content) or not loop.first %}{{ '\\n' }}{% endif %}
    {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
    {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}"""
_RESULTS = """
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"""
_OPEN = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_PLAIN_ANSWER = "{{- '<|im_start|>assistant\\n' + (message.content or '') }}" + _CALLS + "{{- '<|im_end|>\\n' }}"
_LAST = """
{%- set seen = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set seen.last = loop.index0 %}{% endif %}{% endfor %}
{%- if seen.last < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}"""
_REASONING_ANSWER = (
    """
{%- set content, reasoning = message.content or '', message.reasoning_content or '' %}
{%- if not reasoning and '</think>' in content %}
    {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > seen.last and (loop.last or reasoning) %}
    {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{ content }}{% endif %}"""
    + _CALLS
    + "{{- '<|im_end|>\\n' }}"
)


def _chatml(default_system: str, answer: str, first: str = "", opening: str = _OPEN) -> str:
    return (
        f"{{%- set default_system = '{default_system}' %}}{_TOOLS}{first}{_SYSTEM}"
        "{%- for message in messages %}"
        f"{{%- if message.role == 'assistant' %}}{answer}"
        f"{{%- elif message.role == 'tool' %}}{_RESULTS}"
        "{%- elif not (message.role == 'system' and loop.first) %}"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{%- endif %}{%- endfor %}" + opening
    )


_HEAD = "'<|start_header_id|>' + {} + '<|end_header_id|>\\n\\n'"
LLAMA = (
    """{{- '<|begin_of_text|>' }}
{%- if messages[0].role == 'system' %}
    {%- set system, turns = messages[0].content | trim, messages[1:] %}
{%- else %}{% set system, turns = '', messages %}{% endif %}
{{- HEAD_SYSTEM + 'Today Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}
{%- if tools %}
    {{- HEAD_USER + 'Functions:\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n\\n' }}{% endfor %}
    {{- turns[0].content | trim + '<|eot_id|>' }}{% set turns = turns[1:] %}
{%- endif %}
{%- for message in turns %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- HEAD_ASSISTANT + '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}{{ HEAD_TOOL }}{{ message.content | tojson }}{{ '<|eot_id|>' }}
    {%- else %}{{ HEAD_ROLE + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ HEAD_ASSISTANT }}{% endif %}
""".replace("HEAD_SYSTEM", _HEAD.format("'system'"))
    .replace("HEAD_USER", _HEAD.format("'user'"))
    .replace("HEAD_ASSISTANT", _HEAD.format("'assistant'"))
    .replace("HEAD_TOOL", _HEAD.format("'ipython'"))
    .replace("HEAD_ROLE", _HEAD.format("message.role"))
)
TEMPLATES = {
    "chatml": _chatml("", _PLAIN_ANSWER),
    "qwen2.5": _chatml("You are a helpful assistant.", _PLAIN_ANSWER),
    "qwen3": _chatml("", _REASONING_ANSWER, _LAST),
    "qwen3-no-thinking": _chatml(
        "", _REASONING_ANSWER, _LAST, _OPEN.replace("assistant\\n", "assistant\\n<think>\\n\\n</think>\\n\\n")
    ),
    "opens-thinking": _chatml("", _REASONING_ANSWER, _LAST, _OPEN.replace("assistant\\n", "assistant\\n<think>\\n")),
    "llama3.1": LLAMA,
}
END = {name: "<|eot_id|>" if name == "llama3.1" else "<|im_end|>" for name in TEMPLATES}
WORDS = "What is the sum of 3 and 4? Think step by step, then answer: \n\n it's 12.5 % of {'a': 1}! "
WORDS += "\u00e9\u4f60\u597d \U0001f600"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer whose merges cross the templates' words."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([*TEMPLATES.values(), WORDS, WORDS], trainer)
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in ADDED])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    path = tmp_path_factory.mktemp("tokenizer")
    wrapped.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> ChatTokenizer:
    return load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def chat_format(tokenizer_folder: Path, tokenizer: ChatTokenizer) -> Callable[..., ChatFormat]:
    """A chat format by the name or source of its template."""

    def make(template: str | Mapping[str, str], reader: Parser | None = None, system_prompt: str = "") -> ChatFormat:
        source = TEMPLATES.get(template, template) if isinstance(template, str) else template
        chat = ChatTemplate(source, special_tokens(tokenizer_folder), system_prompt=system_prompt)
        return ChatFormat(PromptFormat(tokenizer, chat), reader or parser("hermes"))

    return make


class FakePolicy:
    """Answers with random tokens, or with `texts` in turn; remembers what it was asked and what it said.

    Args:
        end_id: ends its answers.
        texts: what it says, tokenised by `encode`; empty: random ids.
    """

    def __init__(self, end_id: int, vocab: int = 0, encode: Callable[[str], list[int]] | None = None, *texts: str):
        self._end_id, self._vocab, self._encode, self._texts = end_id, vocab, encode, list(texts)
        self.asked: list[GenerationRequest] = []
        self.sampled: list[Completion] = []
        self.answered: list[tuple[GenerationRequest, list[Completion]]] = []
        self.cut = False

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.asked.append(request)
        completions = []
        for index in range(request.n):
            chance = random.Random(f"{request.sampling.seed}/{index}")
            if self._texts:
                assert self._encode is not None
                ids = self._encode(self._texts.pop(0))
            else:
                others = [token for token in range(self._vocab) if token != self._end_id]  # an answer holds a token
                ids = [chance.choice(others) for _ in range(chance.randrange(1, 12))]
            ids = [token for token in ids if token != self._end_id]
            ids = ids if self.cut else [*ids, self._end_id]
            ids = ids[: request.sampling.max_new_tokens]
            finish = FinishReason.stop if ids and ids[-1] == self._end_id else FinishReason.length
            logprobs = [-chance.random() for _ in ids]
            versions = [chance.randrange(5) for _ in ids]
            completions.append(Completion(ids, logprobs, versions, finish))
        self.sampled += completions
        self.answered.append((request, completions))
        return GenerationResult(request.request_id, tuple(completions))


@pytest.fixture
def prompt() -> Prompt:
    sampling = SamplingParams(max_new_tokens=64, seed=7)
    return Prompt("p0", 0, {"prompt": "What is 3 + 4?"}, (1, 2, 3), 1, sampling)
