"""The methods that asyncrl needs from a tokenizer; every Hugging Face tokenizer has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """A text codec with an end-of-sequence token."""

    @property
    def eos_token_id(self) -> int:
        """Id of the token that ends an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without added special tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, without special tokens."""
        ...
