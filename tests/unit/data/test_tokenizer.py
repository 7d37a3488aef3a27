from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from asyncrl.data.tokenizers import CharTokenizer, FastTokenizer, HuggingFaceTokenizer, load_tokenizer

TEXT = "37+5=42;42+81=123#123"


def test_the_arithmetic_alphabet_has_seventeen_symbols() -> None:
    assert CharTokenizer().vocab_size == 17


def test_decode_undoes_encode_and_leaves_specials_out() -> None:
    tokenizer = CharTokenizer()
    ids = [*tokenizer.encode(TEXT), tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids) == TEXT


def test_a_character_outside_the_alphabet_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="'x'"):
        CharTokenizer().encode("3x4")


def test_an_alphabet_that_repeats_a_character_is_refused() -> None:
    with pytest.raises(ValueError, match="each once"):
        CharTokenizer("aa")


def test_a_saved_char_tokenizer_is_loaded_without_transformers(tmp_path: Path) -> None:
    CharTokenizer().save(tmp_path)
    program = (
        "import sys; from asyncrl.data.tokenizers import load_tokenizer; "
        f"assert load_tokenizer({str(tmp_path)!r}).encode('1+2') == [4, 13, 5]; "
        "sys.exit(int('transformers' in sys.modules or 'torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=300, check=False).returncode == 0


def test_transformers_reads_the_saved_char_tokenizer_as_the_same_codec(tmp_path: Path) -> None:
    tokenizer = CharTokenizer()
    tokenizer.save(tmp_path)
    fast = AutoTokenizer.from_pretrained(tmp_path)
    assert fast.encode(TEXT, add_special_tokens=False) == tokenizer.encode(TEXT)
    assert (fast.eos_token_id, fast.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert fast.decode([*tokenizer.encode(TEXT), tokenizer.eos_token_id], skip_special_tokens=True) == TEXT


@pytest.mark.parametrize(("more_tokens", "kind"), [(False, FastTokenizer), (True, HuggingFaceTokenizer)])
def test_a_directory_without_the_mark_is_opened_by_tokenizers_or_where_its_config_has_more_tokens_by_transformers(
    tmp_path: Path, more_tokens: bool, kind: type
) -> None:
    CharTokenizer().save(tmp_path)
    fast = AutoTokenizer.from_pretrained(tmp_path)
    other = tmp_path / "other"
    fast.save_pretrained(other)
    config = other / "tokenizer_config.json"
    described = json.loads(config.read_text(encoding="utf-8"))
    del described["asyncrl_symbols"]
    if more_tokens:
        described["added_tokens_decoder"] = {"99": {"content": "<more>", "special": True}}
    config.write_text(json.dumps(described), encoding="utf-8")
    loaded = load_tokenizer(other)
    assert isinstance(loaded, kind)
    assert loaded.decode(loaded.encode(TEXT)) == TEXT
    assert loaded.eos_token_id == CharTokenizer.eos_token_id
