"""From a row of the dataset to the `Prompt` that an agent receives: one place, so that all processes make the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from asyncrl.api import Prompt, SamplingParams
from asyncrl.config.setting import ConfigError
from asyncrl.plugins.datasets import Dataset
from asyncrl.plugins.datasets.queue.order import PromptRef, prompt_seed
from asyncrl.plugins.datasets.settings import AUTO, OFF, Overlong
from asyncrl.plugins.datasets.templates.chat import ChatError, ChatTemplate, Message, template_source, wrong_messages
from asyncrl.plugins.datasets.templates.control_tokens import StandIns
from asyncrl.plugins.datasets.templates.template_process import TemplateLimit
from asyncrl.plugins.datasets.tokenizers import ChatTokenizer, special_tokens


class InvalidPrompt(ValueError):
    """A row that makes no prompt, however often it is tried; the message names the row and what to do."""


class OverlongPrompt(InvalidPrompt):
    """A row whose prompt is longer than allowed and is not shortened."""


SHORTENED = (Overlong.left, Overlong.right, Overlong.middle)


@dataclass(frozen=True)
class PromptFormat:
    """Rendering of rows to token ids.

    `chat` is None where prompts are plain text. `tools` are those that the agent offers in its first call, which the
    template shows the model beside the messages. A prompt longer than `max_tokens`, all of it counted as rendered, is
    shortened where `overlong` says so: characters of the user's last message (of a plain prompt: of its text) are cut
    until it fits, so that the template around them stays whole.
    """

    tokenizer: ChatTokenizer
    chat: ChatTemplate | None = None
    max_tokens: int | None = None
    overlong: Overlong = Overlong.filter
    tools: Sequence[Message] = ()

    def rendered(self, prompt: str | Sequence[Message]) -> str:
        """The text whose tokens the model gets.

        Raises:
            InvalidPrompt: these are messages and there is no chat template, they are malformed, or the template refuses
                them.
        """
        self._check(prompt)
        if self.chat is None:
            return str(prompt)
        try:
            return self.chat.render_turns(self.chat.messages(prompt), self.tools)
        except ChatError as error:
            raise InvalidPrompt(str(error)) from None

    def _check(self, prompt: str | Sequence[Message]) -> None:
        if isinstance(prompt, str):
            return
        if (wrong := wrong_messages(prompt)) is not None:
            raise InvalidPrompt(f"the prompt is neither text nor messages: {wrong}")
        if self.chat is None:
            raise InvalidPrompt(
                "the prompt is messages and there is no chat template; set dataset.chat_template to a Jinja file (or "
                "to auto, with a model whose tokenizer has one), or give text"
            )

    def encode(self, row: Mapping[str, Any]) -> list[int]:
        """Token ids of the prompt of `row`; raises as `fitted` does."""
        return self.fitted(row)[1]

    def fitted(self, row: Mapping[str, Any]) -> tuple[str | Sequence[Message], list[int]]:
        """The prompt of `row`, shortened where that is due, and its token ids.

        Raises:
            KeyError: the row has no `prompt`.
            InvalidPrompt: it makes none, or an empty one.
            OverlongPrompt: it is too long and is not to be shortened, or not even without its text short enough.
        """
        prompt = row["prompt"]
        ids = self._ids(prompt)
        if not ids:
            raise InvalidPrompt("the prompt is empty: give it at least one token")
        if self.max_tokens is None or len(ids) <= self.max_tokens:
            return prompt, ids
        too_long = OverlongPrompt(
            f"dataset.max_prompt_tokens={self.max_tokens}: the prompt has {len(ids)} tokens{self._of_tools()}; raise "
            "the setting, have such prompts shortened (dataset.overlong=left, right or middle), or leave them out of "
            "the dataset"
        )
        if self.overlong not in SHORTENED:
            raise too_long
        text, shortened = _last_text(prompt)
        shortest, longest = 0, len(text) - 1
        best: tuple[str | Sequence[Message], list[int]] | None = None
        while shortest <= longest:
            kept = (shortest + longest) // 2
            tried = shortened(_cut(text, kept, self.overlong))
            ids = self._ids(tried)
            if len(ids) > self.max_tokens:
                longest = kept - 1
            else:
                shortest = kept + 1
                best = (tried, ids) if ids else best
        if best is None:
            raise too_long
        return best

    def tool_tokens(self) -> int:
        """Tokens that the template shows `tools` in, of a prompt of one word."""
        if self.chat is None or not self.tools:
            return 0
        turns = self.chat.messages("x")
        return len(self.chat_ids(turns, self.tools)) - len(self.chat_ids(turns))

    def _of_tools(self) -> str:
        count = self.tool_tokens()
        return f", {count} of them what the template says of the tools" if count else ""

    def _ids(self, prompt: str | Sequence[Message]) -> list[int]:
        self._check(prompt)
        try:
            if self.chat is None:
                return self.tokenizer.encode(str(prompt))
            return self.chat_ids(self.chat.messages(prompt), self.tools)
        except ChatError as error:
            raise InvalidPrompt(str(error)) from None
        except ValueError as error:  # a character that an alphabet of few does not have
            raise InvalidPrompt(str(error)) from None

    def chat_ids(self, turns: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Token ids of messages through the chat template; names of control tokens within them stay text.

        Raises:
            ChatError: the template refuses them.
            ValueError: the tokenizer does not know a character.
        """
        assert self.chat is not None, "plain prompts have no template"
        places = StandIns(self.tokenizer, turns, tools)
        return places.encode(self.chat.render_turns(places.put(turns), places.put(tools)))


class ChatSettings(Protocol):
    """The settings of a chat template, under `dataset`."""

    chat_template: str
    chat_template_args: dict[str, Any]
    system_prompt: str


def load_chat_template(folder: Path, data: ChatSettings) -> ChatTemplate | None:
    """The template that `data` names, for the tokenizer in `folder`; None where prompts are plain text.

    Raises:
        ConfigError: it cannot be read, it is no template or one that takes more than the limits of a rendering, or a
            setting of it is given where there is none.
    """
    source = None
    if data.chat_template == AUTO:
        source = template_source(folder)
    elif data.chat_template != OFF:
        try:
            source = Path(data.chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"dataset.chat_template={data.chat_template!r}: cannot be read ({error})") from None
    if source is None:
        for name in ("system_prompt", "chat_template_args"):
            if value := getattr(data, name):
                raise ConfigError(
                    f"dataset.{name}={value!r}: the tokenizer in {str(folder)!r} has no chat template to take it; set "
                    "dataset.chat_template to a Jinja file, or leave it out"
                )
        return None
    try:
        template = ChatTemplate(source, special_tokens(folder), data.chat_template_args, data.system_prompt)
        with contextlib.suppress(ChatError):  # other conversations than this may be what it is for
            template.render("x")
    except (ChatError, TemplateLimit) as error:
        raise ConfigError(f"dataset.chat_template={data.chat_template!r} (tokenizer in {folder}): {error}") from None
    return template


def make_prompt(
    ref: PromptRef,
    dataset: Dataset,
    prompt_format: PromptFormat,
    group_size: int,
    sampling: SamplingParams,
    run_seed: int,
) -> Prompt:
    """The prompt at `ref`, tokenised, with a sampling seed of its own and the tokenizer's end token as stop token.

    Raises:
        KeyError: the dataset's row has no `prompt`.
        InvalidPrompt: it makes no prompt.
    """
    row = dataset.row(ref.row)
    try:
        prompt, ids = prompt_format.fitted(row)
    except InvalidPrompt as error:
        raise type(error)(f"row {ref.row} of the dataset: {error}") from None
    if prompt is not row["prompt"]:  # agents that converse in messages take it from the row
        row = {**row, "prompt": prompt}
    seeded = replace(
        sampling,
        seed=prompt_seed(run_seed, ref.order, ref.attempt),
        stop_token_ids=(prompt_format.tokenizer.eos_token_id,),
    )
    return Prompt(ref.prompt_id, ref.order, row, tuple(ids), group_size, seeded)


def _last_text(prompt: str | Sequence[Message]) -> tuple[str, Callable[[str], str | list[Message]]]:
    """The text of `prompt` that may be shortened, and the prompt with another one in its place."""
    if isinstance(prompt, str):
        return prompt, str
    users = [number for number, turn in enumerate(prompt) if turn["role"] == "user" and turn.get("content")]
    number = users[-1] if users else len(prompt) - 1
    before, turn, after = prompt[:number], prompt[number], prompt[number + 1 :]
    return str(turn.get("content") or ""), lambda text: [*before, {**turn, "content": text}, *after]


def _cut(text: str, kept: int, side: Overlong) -> str:
    """`kept` characters of `text`, without those of one `side`."""
    if side is Overlong.left:
        return text[len(text) - kept :]
    if side is Overlong.right:
        return text[:kept]
    head = (kept + 1) // 2
    return text[:head] + text[len(text) - (kept - head) :]
