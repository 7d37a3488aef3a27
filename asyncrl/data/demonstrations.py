"""Demonstrations for supervised training: rows become tokens with a loss mask, all at once or on demand, and batches of
rows are drawn.

Without a chat template a row is its prompt, the answer and the end token; the answer and the end token carry loss.

With a chat template a row is a conversation. The tokens that the model would have to write carry loss: in an
assistant's turn everything after the generation prompt, up to and including the control token that ends the turn. These
tokens are found by rendering, never by searching for words: for turn i the template renders the messages before it with
a generation prompt (P), and the messages up to it without one (W). W begins with P, and the rest of W is the turn.

    P  <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    W  <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
       no loss                                          here ─┴──────────────┘ none

Each part is tokenised separately, so P's tokens are those of a prompt after which the model writes. If the next turn's
P continues W, the turns are one sequence. If the template renders earlier turns differently (Qwen3 leaves out their
reasoning), the conversation continues as another sequence. So each turn is learnt in the context that it will have.

Pictures are in the turns of users, tools and the system. Their placeholders carry no loss.

Preference training has judged answers, in TRL's forms, of which the first is verl's too:

    {"prompt": "1+2=", "chosen": "#3", "rejected": "#4"}            a pair, as text
    {"prompt": [...], "chosen": [...], "rejected": [...]}           a pair, as messages
    {"chosen": [..., ...], "rejected": [..., ...]}                  the prompt is what both begin with
    {"prompt": "1+2=", "completion": "#3", "label": true}           a labelled answer

A pair may have a `margin`. A pair becomes two sequences, a labelled answer one: the prompt and one answer, whose turns
carry loss as in a demonstration. A sequence ends with its last loss token, like an answer that the model wrote, and a
reward model scores it there.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from asyncrl.api.chat import Message
from asyncrl.api.picture import Picture, PictureError, PlacedPicture
from asyncrl.config.plugin_code.import_paths import PluginError
from asyncrl.data.chat_template import ChatError, StandIns
from asyncrl.data.datasets import DemonstrationDataset, Located, load_dataset
from asyncrl.data.files import CHOSEN, COMPLETION_FIELDS, REJECTED, without_none
from asyncrl.data.picture_parts import (
    PictureRules,
    expanded,
    pictures_of,
    placed,
    prompt_with_pictures,
    with_content,
    without_pictures,
    wrong_turns,
)
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.prompt_queue import epoch_order
from asyncrl.data.settings import IMAGE_FIELDS, TrainOn, is_data_path
from asyncrl.data.tokenizers import ChatTokenizer


class BadDemonstration(ValueError):
    """A row that has nothing to imitate; the message says why."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A sequence with its loss mask, in which the first token is never set, and its pictures."""

    token_ids: list[int]
    loss_mask: list[bool]
    pictures: tuple[PlacedPicture, ...] = ()

    @property
    def answer_length(self) -> int:
        """Tokens that carry loss."""
        return sum(self.loss_mask)


@dataclass(frozen=True, slots=True)
class DemonstrationFormat:
    """Conversion of rows to demonstrations."""

    prompts: PromptFormat
    train_on: TrainOn = TrainOn.all

    @property
    def sequences(self) -> int:
        """Sequences of an ordinary row."""
        return 1

    def encode(self, dataset: DemonstrationDataset, row: Mapping[str, Any]) -> list[Demonstration]:
        """Return the demonstrations of `row`: one, or several if the template renders earlier turns differently.

        Raises:
            BadDemonstration: it has no answer, the template refuses it, there are messages and no template, or it has
                pictures that cannot be used.
        """
        try:
            row = {**row, "prompt": prompt_with_pictures(row)}
        except PictureError as error:
            raise BadDemonstration(str(error)) from None
        if self.prompts.chat is not None:
            return self.conversation(conversation_of(dataset, row), tools_of(row))
        return [self.text(row["prompt"], dataset.demonstration(row))]

    def text(self, prompt: Any, answer: Any) -> Demonstration:
        """Return the demonstration of a prompt and an answer without a chat template.

        Raises:
            BadDemonstration: they are not text.
        """
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise BadDemonstration(
                "it is messages and there is no chat template; set dataset.chat_template to a Jinja file (or to auto, "
                "with a model whose tokenizer has one), or give text"
            )
        tokenizer = self.prompts.tokenizer
        before, after = tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.eos_token_id]
        return Demonstration(before + after, [False] * len(before) + [True] * len(after))

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Message], first: int = 0
    ) -> list[Demonstration]:
        """Return the demonstrations of a conversation; messages before number `first` carry no loss.

        Raises:
            BadDemonstration: it has no answer, or the template refuses it.
        """
        if (wrong := wrong_conversation(messages)) is not None:
            raise BadDemonstration(wrong)
        assert self.prompts.chat is not None
        shown = self._with_pictures(messages)
        pictures, whole = [*pictures_of(shown)], self.prompts.chat.messages(without_pictures(shown))
        stand_ins = StandIns(self.prompts.tokenizer, whole, tools)
        turns, offered = stand_ins.put(whole), stand_ins.put(tools)
        first += len(turns) - len(messages)  # a system message may have been added at the front
        answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant" and number >= first]
        found: list[_Sequence] = []
        try:
            for number in answers if self.train_on is TrainOn.all else answers[-1:]:
                before, after = self._around(turns[: number + 1], offered)
                if not found or not before.startswith(found[-1].text):
                    control = tuple(self.prompts.tokenizer.control_tokens)
                    found.append(_Sequence(stand_ins, control, self.prompts.pictures, pictures))
                found[-1].add(before, after)
            return [each.demonstration() for each in found]
        except ValueError as error:  # a ChatError, an unknown character, or a picture
            raise BadDemonstration(str(error)) from None

    def _with_pictures(self, messages: Sequence[Message]) -> list[Message]:
        """Return `messages` with their pictures loaded.

        Raises:
            BadDemonstration: the model takes no pictures, one cannot be used, or a turn of the assistant has one.
        """
        try:
            shown: list[Message] = [with_content(turn) for turn in messages]
        except PictureError as error:
            raise BadDemonstration(str(error)) from None
        if any(True for _ in pictures_of(shown)) and self.prompts.pictures is None:
            raise BadDemonstration(
                "it has pictures, and this training takes none (docs/sft.md says which does): leave the row out"
            )
        if any(True for _ in pictures_of([turn for turn in shown if turn["role"] == "assistant"])):
            raise BadDemonstration("an assistant's turn has a picture, which no model writes: leave the row out")
        return shown

    def _around(self, turns: Sequence[Message], tools: Sequence[Message]) -> tuple[str, str]:
        """Render P, the text before the last of `turns` (the assistant's), and W, the text with it.

        Raises:
            ChatError: the template refuses them, or W does not begin with P.
        """
        assert self.prompts.chat is not None
        before = self.prompts.chat.render_turns(turns[:-1], tools)
        after = self.prompts.chat.render_turns(turns, tools, to_answer=False)
        if not after.startswith(before):
            raise ChatError(
                "the chat template shows an assistant's turn otherwise than its generation prompt begins one "
                f"({before[-40:]!a}), so that it cannot be told what of it the model would write; give the template "
                "the arguments that these answers were made with (dataset.chat_template_args), or another template"
            )
        return before, after


class _Sequence:
    """A sequence under construction: text and tokens so far. `pictures` are the conversation's, in order."""

    def __init__(
        self,
        stand_ins: StandIns,
        control: tuple[str, ...],
        rules: PictureRules | None,
        pictures: Sequence[Picture],
    ) -> None:
        self._stand_ins, self._control = stand_ins, tuple(filter(None, control))
        self._rules, self._pictures = rules, pictures
        self._shown = 0
        self.text = ""
        self.token_ids: list[int] = []
        self.loss_mask: list[bool] = []

    def demonstration(self) -> Demonstration:
        """Return the sequence so far."""
        own = placed(self.token_ids, self._pictures[: self._shown], self._rules)
        return Demonstration(self.token_ids, self.loss_mask, own)

    def add(self, before: str, after: str) -> None:
        """Add an assistant's turn, given the whole text `before` and `after` it."""
        turn = after[len(before) :]
        end = max((turn.rfind(name) + len(name) for name in self._control if name in turn), default=len(turn))
        for part, learnt in ((before[len(self.text) :], False), (turn[:end], True), (turn[end:], False)):
            ids = self._stand_ins.encode(self._expanded(part))
            self.token_ids += ids
            self.loss_mask += [learnt] * len(ids)
        self.text = after

    def _expanded(self, part: str) -> str:
        """Return `part` of the text with placeholders for its pictures, which are the conversation's next ones."""
        own = self._pictures[self._shown :][: 0 if self._rules is None else part.count(self._rules.marker)]
        self._shown += len(own)
        return expanded(part, own, self._rules)


def conversation_of(dataset: DemonstrationDataset, row: Mapping[str, Any]) -> list[Message]:
    """Return the conversation of `row`: its messages if they end with an answer.

    Otherwise the messages, or the text of its prompt as the user's turn, followed by the dataset's demonstration.
    """
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if messages and isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant":
        return messages
    answer = dataset.demonstration(row)
    return [*messages, {"role": "assistant", "content": answer}] if isinstance(answer, str) else [*messages, *answer]


def tools_of(row: Mapping[str, Any]) -> list[Message]:
    """Return the tools that the row's messages may call, given as a list or as JSON in a string.

    Raises:
        BadDemonstration: the row's tools are neither.
    """
    tools = row.get("tools") or []
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise BadDemonstration(f"its 'tools' are not valid JSON ({error})") from None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadDemonstration("its 'tools' are not a list of objects")
    return tools


def wrong_conversation(messages: Sequence[Any]) -> str | None:
    """Return why `messages` have nothing to imitate; None if they have."""
    if (wrong := wrong_turns(messages)) is None and (not messages or messages[-1]["role"] != "assistant"):
        return "its messages do not end with an assistant's: there is no answer to imitate"
    return wrong


class RowFormat(Protocol):
    """Conversion of rows to sequences."""

    @property
    def prompts(self) -> PromptFormat:
        """Tokenizer and chat template."""
        ...

    @property
    def sequences(self) -> int:
        """Most sequences of an ordinary row."""
        ...

    def encode(self, dataset: DemonstrationDataset, row: Mapping[str, Any]) -> list[Demonstration]:
        """Return the sequences of `row`.

        Raises:
            BadDemonstration: the row cannot be used.
        """
        ...


Rows = Sequence[Sequence[Demonstration]]
"""Demonstrations by row."""


class LazyRows(Sequence[list[Demonstration]]):
    """Rows of a dataset, encoded on demand: there may be very many, or their pictures may be large.

    Args:
        numbers: numbers of the rows; None for all of them.
    """

    def __init__(self, dataset: DemonstrationDataset, form: RowFormat, numbers: Sequence[int] | None = None) -> None:
        self._dataset, self._form = dataset, form
        self._numbers = range(len(dataset)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return LazyRows(self._dataset, self._form, self._numbers[index])
        return self._form.encode(self._dataset, self._dataset.row(self._numbers[index]))


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """The encoded rows of a file, without those that are too long, and notes on them for the user."""

    rows: Rows
    notes: tuple[str, ...]

    @classmethod
    def of(cls, dataset: DemonstrationDataset, form: RowFormat, max_tokens: int) -> EncodedRows:
        """Encode all rows of `dataset`; rows with a sequence of more than `max_tokens` tokens are left out.

        Raises:
            BadDemonstration: there is nothing to imitate in a row, or all are too long; names file and line.
        """
        kept: list[list[Demonstration]] = []
        numbers, longest, several, tokens, learnt, shown = [], 0, 0, 0, 0, 0
        for number in range(len(dataset)):
            try:
                encoded = form.encode(dataset, dataset.row(number))
            except BadDemonstration as error:
                location = dataset.location(number) if isinstance(dataset, Located) else f"row {number}"
                raise BadDemonstration(f"{location}: {error}") from None
            length = max(len(each.token_ids) for each in encoded)
            longest = max(longest, length)
            several += len(encoded) > form.sequences
            if length > max_tokens:
                continue
            numbers.append(number)
            learnt += sum(each.answer_length for each in encoded)
            tokens += sum(len(each.token_ids) for each in encoded)
            shown += len(encoded[-1].pictures)
            if not shown:  # rows with pictures are loaded again when they are used
                kept.append(encoded)
        too_long = len(dataset) - len(numbers)
        if not numbers:
            raise BadDemonstration(
                f"all {too_long} rows are longer than dataset.max_tokens={max_tokens} (up to {longest}); raise it"
            )
        notes = [f"{len(numbers)} rows of up to {longest} tokens; {learnt} of {tokens} tokens carry loss"]
        if shown:
            notes.append(f"{shown} pictures")
        if too_long:
            notes.append(f"{too_long} rows are longer than dataset.max_tokens={max_tokens} and left out")
        if several:
            notes.append(f"{several} conversations are several sequences: the template shows earlier turns otherwise")
        return cls(LazyRows(dataset, form, numbers) if shown else kept, tuple(notes))


def load_demonstrations(
    path: str, args: Mapping[str, Any], fields: Mapping[str, str], split: str, seed: int, *, judged: bool = False
) -> DemonstrationDataset:
    """Return one split of the dataset that a `dataset.path` of supervised training names.

    Args:
        judged: its rows have judged answers (`preferences`) in place of demonstrations.

    Raises:
        PluginError: as for `load_dataset`, or the class has no `demonstration` method.
    """
    if is_data_path(path):
        args = {**args, "demonstrations": True, "pairs": judged, **({"fields": dict(fields)} if fields else {})}
    dataset = load_dataset(path, args, split, seed)
    if not judged and not callable(getattr(dataset, "demonstration", None)):
        raise PluginError(f"{path!r}: {type(dataset).__name__} has no method demonstration(row) -> str; give it one")
    return cast(DemonstrationDataset, dataset)


def shown_with_loss(demonstration: Demonstration, tokenizer: ChatTokenizer) -> str:
    """Return the text of `demonstration`, with ⟦ and ⟧ around the parts that carry loss."""
    parts = []
    for learnt, group in itertools.groupby(
        zip(demonstration.token_ids, demonstration.loss_mask, strict=True), key=lambda pair: pair[1]
    ):
        text = tokenizer.decode_all([token for token, _ in group])
        parts.append(f"⟦{text}⟧" if learnt else text)
    return "".join(parts)


def demonstration_batches(
    rows: Rows, *, batch_size: int, steps: int, seed: int, begin: int = 0
) -> Iterator[list[Demonstration]]:
    """Yield batches `begin` to `steps` - 1 of `batch_size` rows' demonstrations, epoch after epoch.

    Each epoch has its own order, which follows from `seed`.
    """
    epochs = (epoch_order(len(rows), seed, epoch).tolist() for epoch in itertools.count())
    order = itertools.islice(itertools.chain.from_iterable(epochs), begin * batch_size, None)
    for _ in range(begin, steps):
        yield [demonstration for _ in range(batch_size) for demonstration in rows[next(order)]]


LABEL, MARGIN = "label", "margin"


@dataclass(frozen=True, slots=True)
class JudgedAnswer(Demonstration):
    """A prompt and an answer to it; `loss_mask` is the answer's.

    Attributes:
        preferred: True for a pair's chosen answer, or an answer labelled true.
        margin: margin of its pair.
    """

    preferred: bool = True
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class JudgedText:
    """An answer of a row before it is tokenised: text, or messages that the assistant ends."""

    prompt: str | Sequence[Any]
    answer: str | Sequence[Any]
    field: str
    preferred: bool
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class PreferenceFormat:
    """Conversion of rows to judged answers.

    Attributes:
        labelled: True if the loss takes answers one by one: a row may then have a label, and a pair counts as two
            answers.
    """

    prompts: PromptFormat
    labelled: bool = False

    @property
    def sequences(self) -> int:
        """Sequences of an ordinary row."""
        return 2

    def encode(self, dataset: DemonstrationDataset, row: Mapping[str, Any]) -> list[Demonstration]:
        """Return the chosen and the rejected answer of `row`, or its one labelled answer.

        Raises:
            BadDemonstration: the row has no answer, or an answer cannot be rendered; the message names the field.
        """
        if _has_pictures(row):
            raise BadDemonstration("it has pictures, which judged answers do not support yet: leave the row out")
        tools = tools_of(row)
        answers: list[Demonstration] = []
        for judged in judged_answers(row, labelled=self.labelled):
            try:
                encoded = self._encode(judged, tools)
            except ValueError as error:
                raise BadDemonstration(f"{judged.field!r}: {error}") from None
            answers.append(JudgedAnswer(*encoded, preferred=judged.preferred, margin=judged.margin))
        if len(answers) == 2 and answers[0].token_ids == answers[1].token_ids:
            raise BadDemonstration(f"{CHOSEN!r} and {REJECTED!r} are the same answer: leave the row out")
        return answers

    def _encode(self, judged: JudgedText, tools: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return tokens and loss mask of an answer, up to its last token that carries loss."""
        if self.prompts.chat is None:
            plain = DemonstrationFormat(self.prompts).text(judged.prompt, judged.answer)
            return plain.token_ids, plain.loss_mask
        prompt = _as_messages("user", judged.prompt)
        answer = _as_messages("assistant", judged.answer)
        if (wrong := wrong_conversation([*prompt, *answer])) is not None:
            raise BadDemonstration(wrong)
        form = DemonstrationFormat(self.prompts, TrainOn.last if len(answer) == 1 else TrainOn.all)
        found = form.conversation([*prompt, *answer], tools, first=len(prompt))
        if len(found) > 1:
            raise BadDemonstration(
                "its turns are several sequences, as the template shows earlier turns otherwise than they were "
                "written; judge the last turn alone: move the turns before it into 'prompt'"
            )
        end = len(found[0].loss_mask) - found[0].loss_mask[::-1].index(True)
        return found[0].token_ids[:end], found[0].loss_mask[:end]


def judged_answers(row: Mapping[str, Any], *, labelled: bool) -> list[JudgedText]:
    """Return the answers of `row`: chosen and rejected, or the labelled one.

    Raises:
        BadDemonstration: a field is missing or of the wrong kind; the message names the field.
    """
    if CHOSEN in row or REJECTED in row or not labelled:
        return _pair(row)
    label = row.get(LABEL)
    if isinstance(label, int) and label in (0, 1):
        label = bool(label)
    if not isinstance(label, bool):
        raise BadDemonstration(
            f"its {LABEL!r} is {label!r}: give true or false, or a pair under {CHOSEN!r} and {REJECTED!r}"
        )
    field = next((name for name in COMPLETION_FIELDS if name in row), COMPLETION_FIELDS[0])
    return [JudgedText(row["prompt"], _answer(row, field), field, label)]


def _pair(row: Mapping[str, Any]) -> list[JudgedText]:
    prompt = row["prompt"]
    answers = {name: _answer(row, name) for name in (CHOSEN, REJECTED)}
    if isinstance(answers[CHOSEN], str) != isinstance(answers[REJECTED], str):
        raise BadDemonstration(f"of {CHOSEN!r} and {REJECTED!r} one is text and one messages: give both alike")
    margin = row.get(MARGIN)
    margin = 0.0 if margin is None else margin
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise BadDemonstration(f"its {MARGIN!r} is {margin!r}: give a number, or leave it out")
    return [JudgedText(prompt, answers[name], name, name == CHOSEN, float(margin)) for name in (CHOSEN, REJECTED)]


def _answer(row: Mapping[str, Any], field: str) -> str | Sequence[Any]:
    """Return the answer under `field`. If it is a conversation that repeats the row's prompt, return the part after the
    prompt.
    """
    answer = row.get(field)
    if not isinstance(answer, str | list | tuple) or not answer:
        raise BadDemonstration(f"its {field!r} is {answer!r}: give an answer, as text or as messages")
    if isinstance(answer, str):
        return answer
    prompt, answer = row["prompt"], [without_none(turn) for turn in answer]
    if isinstance(prompt, list) and len(answer) > len(prompt) and answer[: len(prompt)] == prompt:
        answer = answer[len(prompt) :]
    if (wrong := wrong_conversation(answer)) is not None:
        raise BadDemonstration(f"{field!r}: {wrong}")
    return answer


def _has_pictures(row: Mapping[str, Any]) -> bool:
    prompt = row.get("prompt")
    if any(name in row for name in IMAGE_FIELDS):
        return True
    return isinstance(prompt, list) and any(True for _ in pictures_of(prompt))


def _as_messages(role: str, given: str | Sequence[Any]) -> list[Any]:
    return [{"role": role, "content": given}] if isinstance(given, str) else list(given)
