"""The text of an answer, with its thoughts and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from asyncrl.api import answer_text, without_thoughts
from asyncrl.api.text import opened_thoughts


class Words:
    """A tokenizer of single characters and of named tokens, some of which are control tokens."""

    eos_token_id = 0

    def __init__(self, *control: str, others: Sequence[str] = ()) -> None:
        names = ["<end>", *control]
        self.control_tokens: Mapping[str, int] = {name: number for number, name in enumerate(names)}
        self._texts = [*names, *others]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            named = max((name for name in self._texts if text.startswith(name)), key=len, default=None)
            ids.append(self._texts.index(named) if named else 0x1000 + ord(text[0]))
            text = text[len(named or "x") :]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.decode_all([token for token in token_ids if token not in self.control_tokens.values()])

    def decode_all(self, token_ids: Sequence[int]) -> str:
        return "".join(self._texts[token] if token < 0x1000 else chr(token - 0x1000) for token in token_ids)


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("no thoughts\n", "no thoughts\n"),
        ("<think>a</think>\n\nb", "b"),
        ("a</think> b", "b"),
        ("<think>a", ""),
        ("say <think>a</think> b <think>c", "say  b"),
        ("<think>a<think>b</think>c</think>d", "d"),
        ("<think>a</think><answer>18</answer>", "<answer>18</answer>"),
        ("<thinking>a</thinking>b", "b"),
        ("<thought>a</thought>b", "b"),
        ("<reasoning>\na\n</reasoning>\n<answer>b</answer>", "<answer>b</answer>"),
        ("<seed:think>a</seed:think>b", "b"),
        ("<longcat_think>a</longcat_think>b", "b"),
        ("<Think>a</THINK>b", "b"),
        ('<think effort="high">a</think>b', "b"),
        ("a < b and c > d", "a < b and c > d"),
        ("[THINK]a[/THINK]b", "b"),
        ("[THINK]a </think> b", ""),
        ("<|START_THINKING|>a<|END_THINKING|>b", "b"),
        ("<|channel>thought\na<channel|>b", "b"),
        ("◁think▷a◁/think▷b", "b"),
        ("<|begin_of_thought|>a<|end_of_thought|>b", "b"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>", "b"),
        ("<|channel|>analysis<|message|>a \\boxed{4}", ""),
        ("<|channel|>commentary to=f<|message|>{}<|call|>", ""),
    ],
)
def test_what_is_said_is_what_stands_outside_of_the_thoughts(text: str, spoken: str) -> None:
    assert without_thoughts(text) == spoken


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<user>2+2?<assistant>assistant\n<think>\n", "<think>\n"),
        ("<user>2+2?<assistant><think>", "<think>"),
        ("<user>2+2?<assistant>assistant\n<think>\n\n</think>\n\n", ""),
        ("<user>2+2?<assistant>assistant\n<think>\nOkay, so", "<think>\nOkay, so"),
        ("<user>use <think> tags<assistant>assistant\n", ""),
        ("Think in <think> tags, as in <think>...</think>. Question: 2+2? Answer:", ""),
        ("Think in <think> tags. Question: 2+2? Answer: <think>", "<think>"),
        ("<user>[INST] Think in <think> tags. 2+2? [/INST]", ""),
        ("assistant\n<think>\nOkay, so", ""),
        ("<user>2+2?<assistant>[THINK]", "[THINK]"),
        ("<user>2+2?<assistant><seed:think>", "<seed:think>"),
        ("", ""),
    ],
)
def test_thoughts_that_the_prompt_opens_belong_to_the_answer(prompt: str, opened: str) -> None:
    tokenizer = Words("<user>", "<assistant>", "[THINK]", "[/THINK]", others=["<think>", "</think>"])
    ids = tokenizer.encode(prompt)
    assert opened_thoughts(tokenizer, ids) == opened
    text = answer_text(tokenizer, ids, tokenizer.encode("so 4</think>4<end>"))
    assert text == f"{opened}so 4</think>4"
    if opened not in ("[THINK]", "<seed:think>"):
        assert without_thoughts(text) == "4"


def test_marks_of_thoughts_are_kept_where_they_are_control_tokens_and_others_are_not() -> None:
    tokenizer = Words("[THINK]", "[/THINK]", "<pad>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    assert answer_text(tokenizer, [], tokenizer.encode("[THINK]a[/THINK]b<pad><end>")) == "[THINK]a[/THINK]b"
    answered = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
    assert answer_text(tokenizer, [], tokenizer.encode(answered + "<end>")) == answered
    assert answer_text(tokenizer, [], tokenizer.encode("a<pad>b<end>")) == "ab"


def test_marks_of_which_only_a_part_is_a_control_token_are_kept() -> None:
    tokenizer = Words("<|channel>", "<channel|>", "<pad>")
    answered = "<|channel>thought\na<channel|>b"
    assert answer_text(tokenizer, [], tokenizer.encode(f"{answered}<pad><end>")) == answered
