"""Judged answers for preference training: a row becomes a pair of sequences, or one sequence with a label.

    {"prompt": "1+2=", "chosen": "#3", "rejected": "#4"}            a pair, as text
    {"prompt": [...], "chosen": [...], "rejected": [...]}           a pair, as messages
    {"chosen": [..., ...], "rejected": [..., ...]}                  the prompt is what both begin with
    {"prompt": "1+2=", "completion": "#3", "label": true}           a labelled answer

These are TRL's forms; verl's is the first. A pair may have a `margin`. A sequence is the prompt and one answer. Its
answer's turns carry loss, as in a demonstration (`demonstrations`). It ends with its last loss token, like an answer
that the model wrote, and a reward model scores it there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.api.chat import Message
from asyncrl.data.datasets import DemonstrationDataset
from asyncrl.data.demonstrations import (
    BadDemonstration,
    Demonstration,
    DemonstrationFormat,
    tools_of,
    wrong_conversation,
)
from asyncrl.data.files import CHOSEN, COMPLETION_FIELDS, REJECTED, without_none
from asyncrl.data.picture_parts import pictures_of
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.settings import IMAGE_FIELDS, TrainOn

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
