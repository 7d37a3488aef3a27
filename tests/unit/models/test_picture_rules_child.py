"""The process that returns the texts of pictures prints a line that is not a reply."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from asyncrl.models.pictures.picture_rules import PictureRules, PictureRulesError

KNOWN = '{"token_id": 1, "marker": "m", "placeholder": "p"}'


class Sizes(NamedTuple):
    """A picture's size."""

    size: tuple[int, int]


def test_a_late_answer_is_not_taken_for_the_answer_to_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    answers = 'while read -r line; do echo "a warning"; echo \'{"text": "first"}\'; done'
    script.write_text(f"#!/bin/sh\necho '{KNOWN}'\n{answers}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    rules = PictureRules(tmp_path)
    for width in (1, 2):
        with pytest.raises(PictureRulesError, match="not a reply: 'a warning"):
            rules.text(Sizes((width, 1)))
        assert rules._child is None
    rules.close()
