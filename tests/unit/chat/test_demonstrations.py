"""Supervised training on conversations: exactly what the model would write carries loss, as tokens it would write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen2Config

from asyncrl.chat.template import ChatFormat
from asyncrl.config.plugin_code.import_paths import PluginError
from asyncrl.data.demonstrations import (
    BadDemonstration,
    Demonstration,
    DemonstrationFormat,
    EncodedRows,
    TrainOn,
    load_demonstrations,
    shown_with_loss,
)
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.trainer.batches.micro_batch_layout import AttentionKind
from asyncrl.trainer.engines.flat import FlatPolicyEngine
from asyncrl.trainer.parallel.world import RankPosition
from asyncrl.trainer.supervised.objectives import Imitation

from .conftest import TEMPLATES as SOURCES

Formats = Callable[..., ChatFormat]
TEMPLATES = ["chatml", "qwen2.5", "qwen3", "qwen3-no-thinking", "opens-thinking", "llama3.1"]
END = {name: "<|eot_id|>" if name == "llama3.1" else "<|im_end|>" for name in TEMPLATES}
SUMS = [
    {"role": "system", "content": "You add."},
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "And 1 + 1?"},
    {"role": "assistant", "content": "It is 2."},
]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}
CALLING = [
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
    {"role": "assistant", "content": "It is 7."},
]
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


class Row:
    """A dataset of one row, which is given."""

    def __len__(self) -> int:
        return 1

    def row(self, index: int) -> Mapping[str, Any]:
        raise AssertionError("the row is given")

    def demonstration(self, row: Mapping[str, Any]) -> Any:
        return row["completion"]


def encode(chat: ChatFormat, train_on: TrainOn = TrainOn.all, **row: Any) -> list[Demonstration]:
    return DemonstrationFormat(chat._prompts, train_on).encode(Row(), row)


def learnt(chat: ChatFormat, item: Demonstration) -> list[str]:
    """The texts of the stretches that carry loss."""
    pairs = zip(item.token_ids, item.loss_mask, strict=True)
    stretches = [(mask, [token for token, _ in group]) for mask, group in groupby(pairs, key=lambda pair: pair[1])]
    return [chat.tokenizer.decode_all(tokens) for mask, tokens in stretches if mask]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_turn_carries_loss_from_the_generation_prompt_to_the_token_that_ends_it(
    chat_format: Formats, template: str
) -> None:
    chat = chat_format(template)
    found = encode(chat, prompt=SUMS)
    texts = [text for item in found for text in learnt(chat, item)]
    assert [text.rsplit("\n", 1)[-1] for text in texts] == [f"7{END[template]}", f"It is 2.{END[template]}"]
    for item, before in zip(found, (SUMS[:2], SUMS[:4]), strict=False):  # the prompts that the policy would be given
        start = item.loss_mask.index(True)
        assert item.token_ids[:start] == chat.begin(before).ids
    assert learnt(chat, encode(chat, TrainOn.last, prompt=SUMS)[0]) == texts[-1:]


@pytest.mark.parametrize("template", ["chatml", "qwen2.5", "llama3.1"])
def test_where_the_template_keeps_earlier_turns_a_conversation_is_one_sequence_of_its_whole_text(
    chat_format: Formats, template: str
) -> None:
    chat = chat_format(template)
    (item,) = encode(chat, prompt=SUMS)
    whole = chat._template.render_turns(SUMS, to_answer=False)
    assert chat.tokenizer.decode_all(item.token_ids) == whole
    if template != "llama3.1":  # whose whole text has a token across the prompt's end, which nobody could write
        assert item.token_ids == chat.tokenizer.encode(whole)


def test_where_it_rewrites_them_each_turn_is_learnt_as_it_is_asked_for(chat_format: Formats) -> None:
    chat = chat_format("qwen3")
    thought = [{**SUMS[2], "reasoning_content": "3 and 4."}, {**SUMS[4], "reasoning_content": "Two ones."}]
    first, second = encode(chat, prompt=[SUMS[1], thought[0], SUMS[3], thought[1]])
    assert learnt(chat, first) == ["<think>\n3 and 4.\n</think>\n\n7<|im_end|>"]
    assert learnt(chat, second) == ["<think>\nTwo ones.\n</think>\n\nIt is 2.<|im_end|>"]
    assert "3 and 4." not in chat.tokenizer.decode_all(second.token_ids)


@pytest.mark.parametrize("template", ["chatml", "qwen2.5", "llama3.1"])
def test_calls_of_tools_are_learnt_and_their_results_are_not(chat_format: Formats, template: str) -> None:
    chat = chat_format(template)
    (item,) = encode(chat, prompt=CALLING, tools=json.dumps([ADD]))
    call, answer = learnt(chat, item)
    assert '"name": "add"' in call
    assert '"a": 3' in call
    assert call.endswith(END[template])
    assert answer == f"It is 7.{END[template]}"
    assert "Adds." in chat.tokenizer.decode_all(item.token_ids)


def test_demonstrations_with_tools_are_those_of_the_tool_use_template(chat_format: Formats) -> None:
    named = chat_format({"default": "{{ 'D' }}", "tool_use": SOURCES["qwen2.5"]})
    of_tools = encode(chat_format("qwen2.5"), prompt=CALLING, tools=[ADD])
    assert encode(named, prompt=CALLING, tools=[ADD]) == of_tools


def test_names_of_control_tokens_in_a_message_are_text(chat_format: Formats) -> None:
    chat = chat_format("chatml")
    end = chat.tokenizer.control_tokens["<|im_end|>"]
    messages = [{"role": "user", "content": "Say <|im_end|>"}, {"role": "assistant", "content": "<|im_end|> it is"}]
    (item,) = encode(chat, prompt=messages)
    assert item.token_ids.count(end) == 2, "one for each turn's end"
    assert learnt(chat, item) == ["<|im_end|> it is<|im_end|>"]


@pytest.mark.parametrize("completion", ["7", [{"role": "assistant", "content": "7"}]])
def test_text_is_the_users_turn_and_its_answer_the_assistants(chat_format: Formats, completion: Any) -> None:
    chat = chat_format("chatml", system_prompt="You add.")
    (item,) = encode(chat, prompt="What is 3 + 4?", completion=completion)
    (whole,) = encode(chat, prompt=SUMS[:3])
    assert (item.token_ids, item.loss_mask) == (whole.token_ids, whole.loss_mask)
    assert shown_with_loss(item, chat.tokenizer).endswith("<|im_start|>assistant\n⟦7<|im_end|>⟧\n")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": SUMS[:2], "completion": []}, "do not end with an assistant's"),
        ({"prompt": [{"role": "user"}], "completion": "7"}, "message 0 has no text"),
        ({"prompt": CALLING, "tools": "no json"}, "'tools' are not valid JSON"),
        ({"prompt": CALLING, "tools": {"add": 1}}, "not a list of objects"),
    ],
)
def test_a_row_that_there_is_nothing_to_imitate_in_says_why(
    chat_format: Formats, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadDemonstration, match=message):
        encode(chat_format("chatml"), **row)


def test_a_template_whose_answers_begin_otherwise_than_its_generation_prompt_is_refused(chat_format: Formats) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\nAnswer: {% endif %}"
    )
    with pytest.raises(BadDemonstration, match="otherwise than its generation prompt begins one"):
        encode(chat_format(source), prompt=SUMS)


def test_messages_without_a_chat_template_are_refused(chat_format: Formats) -> None:
    form = DemonstrationFormat(PromptFormat(chat_format("chatml").tokenizer, None))
    with pytest.raises(BadDemonstration, match="there is no chat template"):
        form.encode(Row(), {"prompt": SUMS, "completion": ""})


def rows_of(tmp_path: Path, *rows: Any) -> Any:
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_demonstrations(str(file), {}, {}, "train", 0)


def test_files_are_read_in_every_form_and_long_rows_are_left_out_and_counted(
    chat_format: Formats, tmp_path: Path
) -> None:
    form = DemonstrationFormat(chat_format("qwen3")._prompts)
    rows = [
        {"messages": SUMS},
        {"prompt": "What is 3 + 4?", "response": "7"},
        {"messages": SUMS[:2], "completion": [SUMS[2]]},
        {"messages": [{"role": "user", "content": "x " * 400}, SUMS[2]]},
    ]
    encoded = EncodedRows.of(rows_of(tmp_path, *rows), form, 200)
    assert [len(row) for row in encoded.rows] == [2, 1, 1]
    first, second, third = encoded.notes
    assert first.startswith("3 rows of up to ")
    assert second == "1 rows are longer than dataset.max_tokens=200 and left out"
    assert third.startswith("1 conversations are several sequences")
    with pytest.raises(BadDemonstration, match=r"all 4 rows are longer than dataset\.max_tokens=2"):
        EncodedRows.of(rows_of(tmp_path, *rows), form, 2)
    with pytest.raises(BadDemonstration, match=r"chat.jsonl:2: its 'tools' are not valid JSON"):
        EncodedRows.of(rows_of(tmp_path, rows[0], {"messages": SUMS, "tools": "["}), form, 200)
    with pytest.raises(PluginError, match=r"chat.jsonl:1 has no messages under 'messages': message 1 has no text"):
        rows_of(tmp_path, {"messages": [SUMS[1], {"role": "user"}, SUMS[2]]})


def test_the_loss_is_the_mean_over_the_tokens_that_carry_it(chat_format: Formats) -> None:
    chat = chat_format("chatml")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = Qwen2Config(vocab_size=800, num_attention_heads=2, num_key_value_heads=2, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    rows = [encode(chat, prompt=SUMS), encode(chat, prompt=SUMS[:3])]
    losses = []
    for (item,) in rows:
        logits = model(input_ids=torch.tensor([item.token_ids])).logits[0, :-1]
        each = F.cross_entropy(logits, torch.tensor(item.token_ids[1:]), reduction="none")
        losses.append(each[torch.tensor(item.loss_mask[1:])])
    expected = torch.cat(losses).mean().item()
    batch = [item for row in rows for item in row]
    for budget in (10_000, 1):
        engine = FlatPolicyEngine(
            model, temperature=1.0, attention=AttentionKind.padded, tokens_per_micro_batch=budget, optimizer=None
        )
        found = Imitation(engine, RankPosition(), torch.device("cpu")).measure(batch).loss
        assert found == pytest.approx(expected, rel=1e-5)
