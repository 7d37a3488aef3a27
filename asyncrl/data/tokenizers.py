"""Tokenizers for processes that hold no model.

The demo's `CharTokenizer` needs the standard library alone, so that a RolloutWorker starts in about a second. It is
saved as an equivalent Hugging Face tokenizer, which `transformers.AutoTokenizer` and inference servers read too; a key
of `tokenizer_config.json` tells `load_tokenizer` to use the light class. Other directories are opened by the
`tokenizers` library or, if it cannot read them, by `AutoTokenizer`, which is imported only then.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from asyncrl.api import Tokenizer
from asyncrl.api.picture import PlacedPicture

CONFIG_FILE = "tokenizer_config.json"
SYMBOLS_KEY = "asyncrl_symbols"
"""The key of `tokenizer_config.json` that marks a `CharTokenizer` and holds its alphabet."""
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE, TEMPLATES_DIR = "chat_template.jinja", "additional_chat_templates"
"""The chat template, and the folder of further ones by name, as transformers saves them."""
DEFAULT = "default"
"""Name of the template in `TEMPLATE_FILE`, if a tokenizer has several."""
_FILES = (
    TOKENIZER_FILE,
    CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_FILE,
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ARITHMETIC_SYMBOLS = "0123456789+=;#"

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD, EOS, UNK)


class ChatTokenizer(Tokenizer, Protocol):
    """Further methods of a tokenizer that chat needs; each class below has them."""

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Texts and ids of the special tokens: those that `decode` leaves out."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Encode `text` without control tokens: a control token's name in `text` stays text."""
        ...

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens included."""
        ...


class Rendered(NamedTuple):
    """Token ids, and the pictures that stand at spans of them."""

    ids: list[int]
    pictures: tuple[PlacedPicture, ...] = ()


class CharTokenizer:
    """One token per character of a fixed alphabet, after the specials `<pad>` 0, `<eos>` 1 and `<unk>` 2.

    The default alphabet is that of the arithmetic task: 14 characters, 17 symbols in all.

    Raises:
        ValueError: the alphabet is empty or repeats a character.
    """

    pad_token_id = 0
    eos_token_id = 1

    def __init__(self, symbols: str = ARITHMETIC_SYMBOLS) -> None:
        if not symbols or len(set(symbols)) != len(symbols):
            raise ValueError(f"CharTokenizer.symbols is {symbols!r}: give at least one character, each once")
        self.symbols = symbols
        self._id_of = {char: index for index, char in enumerate(symbols, start=len(SPECIAL_TOKENS))}
        self._text_of = [""] * len(SPECIAL_TOKENS) + list(symbols)

    @property
    def vocab_size(self) -> int:
        """Number of ids, specials included."""
        return len(self._text_of)

    def encode(self, text: str) -> list[int]:
        """Return ids of `text`'s characters.

        Raises:
            ValueError: a character outside the alphabet (a silent `<unk>` would train on garbage).
        """
        id_of = self._id_of
        try:
            return [id_of[char] for char in text]
        except KeyError as error:
            raise ValueError(
                f"text {text!r} has the character {error.args[0]!r}, the tokenizer knows {self.symbols!r}: "
                "use a dataset and environment of this alphabet, or a model with a tokenizer of its own"
            ) from None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`; specials are left out."""
        text_of = self._text_of
        return "".join([text_of[token] for token in token_ids])

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Texts and ids of the specials."""
        return {text: index for index, text in enumerate(SPECIAL_TOKENS)}

    def encode_plain(self, text: str) -> list[int]:
        """Same as `encode`, which adds no special tokens."""
        return self.encode(text)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, specials included."""
        count = len(SPECIAL_TOKENS)
        return "".join([SPECIAL_TOKENS[token] if token < count else self._text_of[token] for token in token_ids])

    def save(self, directory: Path) -> None:
        """Write the alphabet into `directory`, as a tokenizer that `transformers.AutoTokenizer` reads too."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "eos_token": EOS,
            "unk_token": UNK,
            "clean_up_tokenization_spaces": False,
            SYMBOLS_KEY: self.symbols,
        }
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (directory / TOKENIZER_FILE).write_text(json.dumps(self._fast_tokenizer(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> CharTokenizer:
        """Return the tokenizer that `save` wrote."""
        return cls(json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))[SYMBOLS_KEY])

    def _fast_tokenizer(self) -> dict[str, Any]:
        """Return the `tokenizers` library's description of this codec: split into characters, look each one up."""
        specials = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": index, "content": token, **flags} for token, index in specials.items()],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r"[\s\S]"},
                "behavior": "Isolated",
                "invert": False,
            },
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": specials | self._id_of, "unk_token": UNK},
        }


class HuggingFaceTokenizer:
    """The `Tokenizer` methods over a `transformers` tokenizer: nothing added on encode, specials left out on decode.

    Raises:
        ValueError: the tokenizer has no end-of-sequence token.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"tokenizer of {tokenizer.name_or_path!r} has no eos_token: set it in tokenizer_config.json"
            )
        self.wrapped = tokenizer

    @property
    def eos_token_id(self) -> int:
        """Id of the token that ends an answer."""
        return int(self.wrapped.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """Return token ids of `text`, no special tokens added."""
        return list(self.wrapped.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens left out."""
        return str(self.wrapped.decode(list(token_ids), skip_special_tokens=True))

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Texts and ids of the special tokens."""
        return dict(zip(self.wrapped.all_special_tokens, self.wrapped.all_special_ids, strict=True))

    def encode_plain(self, text: str) -> list[int]:
        """Return token ids of `text`, none of a control token."""
        return list(self.wrapped.encode(text, add_special_tokens=False, split_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens included."""
        return str(self.wrapped.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files into `directory`."""
        self.wrapped.save_pretrained(directory)


class FastTokenizer:
    """The `Tokenizer` methods over the `tokenizers` library and a folder's `tokenizer.json`: no transformers, no torch.

    Raises:
        ValueError: the tokenizer does not know its own end-of-sequence token.
    """

    def __init__(self, folder: Path, eos_token: str) -> None:
        import tokenizers

        self._backend = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self._backend.no_truncation()
        self._backend.no_padding()
        eos_token_id = self._backend.token_to_id(eos_token)
        if eos_token_id is None:
            raise ValueError(f"tokenizer of {str(folder)!r} has no token {eos_token!r}, its eos_token: mend its files")
        self._folder = folder
        self.eos_token_id: int = eos_token_id
        self._plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
        self._plain.encode_special_tokens = True
        added = self._backend.get_added_tokens_decoder()
        self.control_tokens: Mapping[str, int] = {
            token.content: index for index, token in added.items() if token.special
        }

    def encode(self, text: str) -> list[int]:
        """Return token ids of `text`, no special tokens added."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens left out."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def encode_plain(self, text: str) -> list[int]:
        """Return token ids of `text`, none of a control token."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens included."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    def save(self, directory: Path) -> None:
        """Copy the tokenizer's files into `directory`."""
        for name, file in model_files(self._folder).items():
            if name in _FILES or Path(name).parent.name == TEMPLATES_DIR:
                (directory / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, directory / name)


def model_files(folder: Path) -> dict[str, Path]:
    """Return the files of the model in `folder` by their names in it, those of `additional_chat_templates` included."""
    files = [*folder.iterdir(), *(folder / TEMPLATES_DIR).glob("*.jinja")]
    return {file.relative_to(folder).as_posix(): file for file in sorted(files) if file.is_file()}


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens in the tokenizer files of `folder`: `bos_token`, `eos_token` and so on."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", CONFIG_FILE):
        file = folder / name
        values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for key in _SPECIAL_KEYS:
            value = values.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                found[key] = value
    return found


def load_tokenizer(path: str | Path) -> ChatTokenizer:
    """Return the tokenizer of the model folder `path`.

    If its `tokenizer.json` has all tokens that its config names, the `tokenizers` library reads it. Otherwise
    transformers reads it, which takes seconds and imports torch.

    Raises:
        ValueError: its files are missing, or it has no end-of-sequence token.
        Exception: its files cannot be read.
    """
    folder = Path(path)
    config = folder / CONFIG_FILE
    described = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if SYMBOLS_KEY in described:
        return CharTokenizer.load(folder)
    eos_token = special_tokens(folder).get("eos_token")
    if eos_token is not None and _is_whole(folder / TOKENIZER_FILE, described):
        return FastTokenizer(folder, eos_token)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path))
    if not tokenizer.encode(
        "a", add_special_tokens=False
    ):  # transformers returns such a tokenizer if the files are missing
        raise ValueError(f"tokenizer of {str(path)!r} has no vocabulary: its files are not there")
    return HuggingFaceTokenizer(tokenizer)


def _is_whole(file: Path, described: Mapping[str, Any]) -> bool:
    """True if the `tokenizer.json` at `file` has every added token of `tokenizer_config.json`, and the folder has no
    tokenizer code.
    """
    if not file.is_file() or "auto_map" in described:
        return False
    added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])
    known = {(token["id"], token["content"]) for token in added}
    named = described.get("added_tokens_decoder", {})
    return all((int(number), token["content"]) in known for number, token in named.items())


def vocabulary_difference(policy: str, other: str) -> str | None:
    """Return an error message if the tokenizers in two folders give tokens different ids, so that the ids of `policy`
    would mean something else to `other`. None if they agree, or if a folder has no tokenizer.json.
    """
    ids, others = vocabulary(policy), vocabulary(other)
    if ids is None or others is None or ids == others:
        return None
    differ = sorted(token for token in ids.keys() | others.keys() if ids.get(token) != others.get(token))
    return (
        f"its tokenizer is not the one of model.path={policy!r}: {len(differ)} tokens differ, for example "
        f"{differ[0]!r}; use a model with the policy's tokenizer"
    )


def vocabulary(folder: str) -> dict[str, int] | None:
    """Return the ids of a tokenizer's tokens; None if its file does not say."""
    try:
        document = json.loads((Path(folder).expanduser() / TOKENIZER_FILE).read_text(encoding="utf-8"))
        vocabulary = document["model"]["vocab"]
        ids = dict(vocabulary) if isinstance(vocabulary, dict) else {str(t[0]): n for n, t in enumerate(vocabulary)}
        return ids | {token["content"]: token["id"] for token in document.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def template_source(folder: Path) -> str | dict[str, str] | None:
    """Return the chat template of the tokenizer in `folder`; several by name; None if there is none.

    As in transformers, the files `chat_template.jinja` (the default) and `additional_chat_templates/<name>.jinja` come
    before what `tokenizer_config.json` holds.
    """
    files = {file.name.removesuffix(".jinja"): file for file in sorted((folder / TEMPLATES_DIR).glob("*.jinja"))}
    if (own := folder / TEMPLATE_FILE).is_file():
        files = {DEFAULT: own, **files}
    found: Any = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    config = folder / CONFIG_FILE
    if not found and config.is_file():
        found = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(found, list):
        found = {each["name"]: each["template"] for each in found}
    if isinstance(found, dict) and found.keys() == {DEFAULT}:
        found = found[DEFAULT]
    return found or None


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of characters, tokens or messages that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
