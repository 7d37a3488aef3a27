"""Rows with judged answers: TRL's and verl's forms become the same tokens; a wrong row is named with its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.setting import ChoiceConfig, ConfigError
from asyncrl.data.demonstrations import (
    BadDemonstration,
    EncodedRows,
    JudgedAnswer,
    PreferenceFormat,
    load_demonstrations,
)
from asyncrl.data.prompt_format import PromptFormat, load_chat_template
from asyncrl.data.tokenizers import CharTokenizer, ChatTokenizer, load_tokenizer
from asyncrl.launch.before_start.data import check_data
from asyncrl.trainer.settings import OptimizerName
from asyncrl.trainer.supervised.settings import SFTConfig, SFTDatasetConfig

USER, SEVEN, EIGHT = (
    {"role": role, "content": text} for role, text in (("user", "3 + 4?"), ("assistant", "7"), ("assistant", "8"))
)


def encoded(tmp_path: Path, row: dict[str, Any], form: PreferenceFormat, max_tokens: int = 4096) -> list[JudgedAnswer]:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    dataset = load_demonstrations(str(file), {}, {}, "train", 0, judged=True)
    (answers,) = EncodedRows.of(dataset, form, max_tokens).rows
    return list(answers)  # type: ignore[arg-type]


def text_of(answer: JudgedAnswer, tokenizer: ChatTokenizer) -> tuple[str, str]:
    """What comes before the answer, and the answer."""
    end = answer.loss_mask.index(True)
    return tokenizer.decode_all(answer.token_ids[:end]), tokenizer.decode_all(answer.token_ids[end:])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "3+4=", "chosen": "#7", "rejected": "#8", "margin": 2},
        {"chosen": "3+4=#7", "rejected": "3+4=#8", "margin": 2},
    ],
)
def test_pairs_of_text_end_with_the_end_token(tmp_path: Path, row: dict[str, Any]) -> None:
    tokenizer = CharTokenizer()
    chosen, rejected = encoded(tmp_path, row, PreferenceFormat(PromptFormat(tokenizer, None)))
    assert tokenizer.decode(chosen.token_ids) == "3+4=#7"
    assert tokenizer.decode(rejected.token_ids) == "3+4=#8"
    assert (chosen.preferred, rejected.preferred, chosen.margin) == (True, False, 2.0)
    for answer in (chosen, rejected):
        assert answer.token_ids[-1] == tokenizer.eos_token_id
        assert answer.loss_mask[-2:] == [True, True]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "3 + 4?", "chosen": "7", "rejected": "8"},
        {"prompt": [USER], "chosen": [SEVEN], "rejected": [EIGHT]},
        {"chosen": [USER, SEVEN], "rejected": [USER, EIGHT]},
        {"prompt": [USER], "chosen": [USER, SEVEN], "rejected": [USER, EIGHT]},
    ],
)
def test_all_forms_of_a_conversation_are_the_same_tokens_up_to_the_end_of_the_answer(
    tmp_path: Path, tiny_chat_model: Path, row: dict[str, Any]
) -> None:
    tokenizer = load_tokenizer(tiny_chat_model)
    form = PreferenceFormat(PromptFormat(tokenizer, load_chat_template(tiny_chat_model, SFTDatasetConfig())))
    chosen, rejected = (text_of(each, tokenizer) for each in encoded(tmp_path, row, form))
    assert chosen[0] == rejected[0]
    assert chosen[0].endswith("<|im_start|>assistant\n")
    assert (chosen[1], rejected[1]) == ("7<|im_end|>", "8<|im_end|>")


def test_labelled_answers_and_pairs_are_judged_one_by_one(tmp_path: Path) -> None:
    form = PreferenceFormat(PromptFormat(CharTokenizer(), None), labelled=True)
    (bad,) = encoded(tmp_path, {"prompt": "3+4=", "completion": "#8", "label": False}, form)
    assert not bad.preferred
    pair = encoded(tmp_path, {"prompt": "3+4=", "chosen": "#7", "rejected": "#8"}, form)
    assert [each.preferred for each in pair] == [True, False]


@pytest.mark.parametrize(
    ("row", "labelled", "message"),
    [
        ({"prompt": "1+1=", "chosen": "#2"}, False, "its 'rejected' is None"),
        ({"prompt": "1+1=", "chosen": "#2", "rejected": ""}, False, "its 'rejected' is ''"),
        ({"prompt": "1+1=", "chosen": "#2", "rejected": [SEVEN]}, False, "one is text and one messages"),
        ({"prompt": "1+1=", "chosen": "#2", "rejected": "#3", "margin": "big"}, False, "its 'margin' is 'big'"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [EIGHT]}, False, "'chosen': its messages do not end with"),
        ({"prompt": "1+1=", "completion": "#2"}, True, "its 'label' is None"),
        ({"prompt": "1+1=", "label": True}, True, "its 'completion' is None"),
    ],
)
def test_a_wrong_row_is_named_before_the_start(
    tmp_path: Path, row: dict[str, Any], labelled: bool, message: str
) -> None:
    file = tmp_path / "rows.jsonl"
    good = {"prompt": "1+2=", "chosen": "#3", "rejected": "#4"}
    file.write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
    config = SFTConfig(
        optimizer=OptimizerName.adamw,
        loss=ChoiceConfig("kto" if labelled else "dpo"),
        dataset=SFTDatasetConfig(str(file)),
    )
    with pytest.raises(ConfigError) as refused:
        check_data(config, None)
    assert message in str(refused.value)
    assert "rows.jsonl:2" in str(refused.value) or "line 2" in str(refused.value)


def test_the_same_answer_twice_and_pairs_that_are_too_long(tmp_path: Path) -> None:
    form = PreferenceFormat(PromptFormat(CharTokenizer(), None))
    with pytest.raises(BadDemonstration, match="are the same answer"):
        encoded(tmp_path, {"prompt": "1+1=", "chosen": "#2", "rejected": "#2"}, form)
    with pytest.raises(BadDemonstration, match="longer than dataset"):
        encoded(tmp_path, {"prompt": "1+1=", "chosen": "#2", "rejected": "#2222"}, form, max_tokens=6)
