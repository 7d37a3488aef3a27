"""Convert a row of the dataset to the `Prompt` that an agent receives, in the same way in every process.

Before a run starts, the prompts of a dataset are measured: lengths, rows without a valid prompt, and the first prompt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl.api import Message, Prompt, SamplingParams
from asyncrl.api.picture import PictureError
from asyncrl.config.setting import ConfigError
from asyncrl.data.datasets import Dataset
from asyncrl.data.prompt_queue import PromptRef, prompt_seed
from asyncrl.data.settings import AUTO, IMAGE_FIELDS, OFF, Overlong
from asyncrl.data.tokenizers import ChatTokenizer, Rendered, special_tokens, template_source

if TYPE_CHECKING:
    from asyncrl.data.chat_template import ChatTemplate
    from asyncrl.data.picture_parts import PictureRules


class InvalidPrompt(ValueError):
    """A row that can never give a prompt; the message names the row and the fix."""


class PicturesRefused(InvalidPrompt):
    """A row with pictures in a run that takes none."""


class OverlongPrompt(InvalidPrompt):
    """A row whose prompt is longer than allowed and is not shortened."""


SHORTENED = (Overlong.left, Overlong.right, Overlong.middle)


@dataclass(frozen=True)
class PromptFormat:
    """Rendering of rows to token ids.

    Attributes:
        chat: the chat template; None if prompts are plain text.
        tools: tools that the agent offers in its first call, which the template shows the model.
        max_tokens: limit on the tokens of the whole rendered prompt.
        overlong: treatment of a longer prompt. To shorten it, characters of the user's last message (or of the plain
            text) are cut until it fits, so that the template around them stays whole.
        pictures: rules for pictures; None if the model takes none.
    """

    tokenizer: ChatTokenizer
    chat: ChatTemplate | None
    max_tokens: int | None = None
    overlong: Overlong = Overlong.filter
    tools: Sequence[Message] = ()
    pictures: PictureRules | None = None

    def rendered(self, prompt: str | Sequence[Message]) -> str:
        """Render the prompt to the text whose tokens the model gets.

        Raises:
            InvalidPrompt: it is messages and there is no chat template, it is malformed, or the template refuses it.
        """
        self._check(prompt)
        if self.chat is None:
            return str(prompt)
        try:
            return self.chat.render_turns(self.chat.messages(prompt), self.tools)
        except ValueError as error:  # a ChatError
            raise InvalidPrompt(str(error)) from None

    def _check(self, prompt: str | Sequence[Message]) -> None:
        if isinstance(prompt, str):
            return
        from asyncrl.data.picture_parts import wrong_messages  # only for prompts that are messages

        if (wrong := wrong_messages(prompt)) is not None:
            raise InvalidPrompt(f"the prompt is neither text nor messages: {wrong}")
        if self.chat is None:
            raise InvalidPrompt(
                "the prompt is messages and there is no chat template; set dataset.chat_template to a Jinja file (or "
                "to auto, with a model whose tokenizer has one), or give text"
            )

    def encode(self, row: Mapping[str, Any]) -> list[int]:
        """Return the token ids of the prompt of `row`. Raises the errors of `fitted`."""
        return self.fitted(row)[1].ids

    def fitted(self, row: Mapping[str, Any]) -> tuple[str | Sequence[Message], Rendered]:
        """Return the prompt of `row`, with its pictures read and shortened if needed, and its token ids.

        Raises:
            KeyError: the row has no `prompt`.
            InvalidPrompt: the prompt is not valid, or empty.
            OverlongPrompt: it is too long and must not be shortened, or is too long even without its text.
        """
        prompt = self._read(row)
        whole = self._encoded(prompt)
        ids = whole.ids
        if not ids:
            raise InvalidPrompt("the prompt is empty: give it at least one token")
        if self.max_tokens is None or len(ids) <= self.max_tokens:
            return prompt, whole
        tools = self.tool_tokens()
        of_tools = f", {tools} of them what the template says of the tools" if tools else ""
        too_long = OverlongPrompt(
            f"dataset.max_prompt_tokens={self.max_tokens}: the prompt has {len(ids)} tokens{of_tools}; raise "
            "the setting, have such prompts shortened (dataset.overlong=left, right or middle), or leave them out of "
            "the dataset"
        )
        if self.overlong not in SHORTENED:
            raise too_long
        text, shortened = _last_text(prompt)
        shortest, longest = 0, len(text) - 1
        best: tuple[str | Sequence[Message], Rendered] | None = None
        while shortest <= longest:
            kept = (shortest + longest) // 2
            tried = shortened(_cut(text, kept, self.overlong))
            rendered = self._encoded(tried)
            if len(rendered.ids) > self.max_tokens:
                longest = kept - 1
            else:
                shortest = kept + 1
                best = (tried, rendered) if rendered.ids else best
        if best is None:
            raise too_long
        return best

    def tool_tokens(self) -> int:
        """Return the number of tokens by which the description of `tools` lengthens a prompt."""
        if self.chat is None or not self.tools:
            return 0
        turns = self.chat.messages("x")
        with_tools = self.chat.conversation(self.tokenizer, turns, self.tools)
        return len(with_tools.ids) - len(self.chat.conversation(self.tokenizer, turns).ids)

    def _read(self, row: Mapping[str, Any]) -> str | Sequence[Message]:
        """Return the prompt of `row`, with its pictures loaded."""
        given: str | Sequence[Message] = row["prompt"]
        if isinstance(given, str) and not any(name in row for name in IMAGE_FIELDS):
            return given
        if not isinstance(given, str) and not (
            isinstance(given, list | tuple) and all(isinstance(turn, Mapping) for turn in given)
        ):
            return given  # refused by `_check`
        from asyncrl.data.picture_parts import pictures_of, prompt_with_pictures, with_content

        try:
            prompt = prompt_with_pictures(row)
            if isinstance(prompt, str) or not any(isinstance(turn.get("content"), list) for turn in prompt):
                return given if prompt == given else prompt
            if self.pictures is None and any(True for _ in pictures_of(prompt)):
                raise PicturesRefused(
                    "the prompt has pictures, and this run takes none (docs/vision.md says which runs do): leave such "
                    "rows out"
                )
            return [with_content(turn) for turn in prompt]
        except PictureError as error:
            raise InvalidPrompt(str(error)) from None

    def _encoded(self, prompt: str | Sequence[Message]) -> Rendered:
        self._check(prompt)
        try:
            if self.chat is None:
                return Rendered(self.tokenizer.encode(str(prompt)))
            turns = self.chat.messages(prompt)
            return self.chat.conversation(self.tokenizer, turns, self.tools, pictures=self.pictures)
        except ValueError as error:  # a ChatError, or a character that the tokenizer does not know
            raise InvalidPrompt(str(error)) from None


class ChatSettings(Protocol):
    """The settings of a chat template, under `dataset`."""

    chat_template: str
    chat_template_args: dict[str, Any]
    system_prompt: str


def load_chat_template(folder: Path, data: ChatSettings) -> ChatTemplate | None:
    """Load the template that `data` names, for the tokenizer in `folder`; None if prompts are plain text.

    Raises:
        ConfigError: it cannot be read, is not a template, or exceeds the limits of rendering; or one of its settings is
            given without a template.
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
    from asyncrl.data.chat_template import ChatError, ChatTemplate
    from asyncrl.data.template_sandbox import TemplateLimit

    try:
        template = ChatTemplate(source, special_tokens(folder), data.chat_template_args, data.system_prompt)
        with contextlib.suppress(ChatError):  # the template may be made for other conversations than this one
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
    """Return the prompt at `ref`, tokenised, with its own sampling seed and the tokenizer's end token as stop token.

    Raises:
        KeyError: the dataset's row has no `prompt`.
        InvalidPrompt: the row has no valid prompt.
    """
    row = dataset.row(ref.row)
    try:
        prompt, rendered = prompt_format.fitted(row)
    except InvalidPrompt as error:
        raise type(error)(f"row {ref.row} of the dataset: {error}") from None
    if prompt is not row["prompt"]:  # agents that use messages read the prompt from the row
        row = {key: value for key, value in row.items() if key not in IMAGE_FIELDS or not rendered.pictures}
        row["prompt"] = prompt
    seeded = replace(
        sampling,
        seed=prompt_seed(run_seed, ref.order, ref.attempt),
        stop_token_ids=(prompt_format.tokenizer.eos_token_id,),
    )
    return Prompt(ref.prompt_id, ref.order, row, tuple(rendered.ids), group_size, seeded, pictures=rendered.pictures)


def _last_text(prompt: str | Sequence[Message]) -> tuple[str, Callable[[str], str | list[Message]]]:
    """Return the text of `prompt` that may be shortened, and a function that returns the prompt with another text in
    its place.
    """
    if isinstance(prompt, str):
        return prompt, str
    users = [number for number, turn in enumerate(prompt) if turn["role"] == "user" and turn.get("content")]
    number = users[-1] if users else len(prompt) - 1
    before, turn, after = prompt[:number], prompt[number], prompt[number + 1 :]
    if isinstance(parts := turn.get("content"), list):
        last = max((index for index, part in enumerate(parts) if part["type"] == "text"), default=None)
        if last is None:
            return "", lambda text: list(prompt)
        head, tail = parts[:last], parts[last + 1 :]
        return parts[last]["text"], lambda text: [
            *before,
            {**turn, "content": [*head, {"type": "text", "text": text}, *tail]},
            *after,
        ]
    return str(turn.get("content") or ""), lambda text: [*before, {**turn, "content": text}, *after]


def _cut(text: str, kept: int, side: Overlong) -> str:
    """Shorten `text` to `kept` characters by removing characters on one `side`."""
    if side is Overlong.left:
        return text[len(text) - kept :]
    if side is Overlong.right:
        return text[:kept]
    head = (kept + 1) // 2
    return text[:head] + text[len(text) - (kept - head) :]


SHOWN_CHARACTERS = 2000
"""Characters of the first prompt that are shown: its beginning and end, which come from the template."""


@dataclass(frozen=True)
class PromptStats:
    """Findings in the first `looked_at` rows of a dataset's `rows`.

    Attributes:
        longest: tokens of the longest valid prompt, before any is shortened.
        longest_used: tokens of the longest prompt that is used, after shortening.
        bad: rows without a valid prompt for another reason than length, and rows before the first used prompt that are
            too long even when shortened.
        first_bad: reason why the first of these rows has no valid prompt.
        first: the first used prompt, its text and its number of tokens.
        tools: tokens of each prompt that describe the tools.
        highest: the highest token of valid prompts; -1 if there is none.
        mcp: True if tools of MCP servers, which are not known yet, will add to that.
    """

    rows: int
    looked_at: int
    longest: int
    longest_used: int
    overlong: int
    bad: int
    first_overlong: str
    first_bad: str
    first: tuple[str, int] | None
    tools: int = 0
    highest: int = -1
    mcp: bool = False

    def lines(self, max_tokens: int, overlong: Overlong) -> list[str]:
        """Return the findings as text."""
        of = "" if self.looked_at == self.rows else f" (of the first {self.looked_at})"
        found = [f"{self.rows} rows; prompts of up to {self.longest} tokens{of}"]
        if self.tools:
            found.append(f"{self.tools} tokens of each prompt are what the chat template says of the tools")
        if self.mcp:
            found.append("the tools of MCP servers come on top, and are counted once these are connected")
        if self.overlong:
            fate = f"cut ({overlong})" if overlong in SHORTENED else "left out"
            found.append(f"{self.overlong} are longer than dataset.max_prompt_tokens={max_tokens}: {fate}{of}")
        if self.bad:
            found.append(f"{self.bad} make no prompt and are left out{of}; {self.first_bad}")
        return found


def measure_prompts(dataset: Dataset, prompt_format: PromptFormat, limit: int | None = None) -> PromptStats:
    """Look at the first `limit` rows of `dataset` (None: all)."""
    rows = len(dataset)
    looked_at = rows if limit is None else min(rows, limit)
    unlimited = replace(prompt_format, max_tokens=None)
    longest = longest_used = overlong = bad = 0
    highest = -1
    first_overlong = first_bad = ""
    first: tuple[str, int] | None = None
    for number in range(looked_at):
        row = dataset.row(number)
        try:
            ids = unlimited.encode(row)
        except PicturesRefused as error:
            raise PicturesRefused(f"row {number}: {error}") from None
        except InvalidPrompt as error:
            bad += 1
            first_bad = first_bad or f"row {number}: {error}"
            continue
        length, highest = len(ids), max(highest, *ids)
        longest = max(longest, length)
        too_long = prompt_format.max_tokens is not None and length > prompt_format.max_tokens
        if not too_long or prompt_format.overlong in SHORTENED:
            longest_used = max(longest_used, min(length, prompt_format.max_tokens or length))
        if first is None and (not too_long or prompt_format.overlong in SHORTENED):
            try:
                prompt, rendered = prompt_format.fitted(row)
            except OverlongPrompt:
                bad += 1
                most = f"dataset.max_prompt_tokens={prompt_format.max_tokens}"
                first_bad = first_bad or f"row {number}: even without the user's text it is longer than {most}"
                continue
            first = prompt_format.rendered(prompt), len(rendered.ids)
        if too_long:
            overlong += 1
            first_overlong = first_overlong or f"row {number} has a prompt of {length} tokens"
    return PromptStats(
        rows=rows,
        looked_at=looked_at,
        longest=longest,
        longest_used=longest_used,
        overlong=overlong,
        bad=bad,
        first_overlong=first_overlong,
        first_bad=first_bad,
        first=first,
        tools=prompt_format.tool_tokens(),
        highest=highest,
    )


def shown(text: str) -> str:
    """Return `text`; a long text without its middle."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
