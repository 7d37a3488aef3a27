"""The process that returns the texts of pictures prints a line that is not a reply."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from asyncrl.models.picture_rules import PictureRules, PictureRulesError

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


@pytest.mark.timeout(30)
def test_half_an_answer_ends_with_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho '{KNOWN}'\nread -r line\nprintf '{{\"text\": '\ncat > /dev/null\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    rules = PictureRules(tmp_path)
    assert rules.marker == "m"
    monkeypatch.setattr("asyncrl.models.picture_rules.ANSWER_S", 0.1)
    with pytest.raises(PictureRulesError, match=r"no answer on a picture's size within 0\.1 s"):
        rules.text(Sizes((1, 1)))
    rules.close()
