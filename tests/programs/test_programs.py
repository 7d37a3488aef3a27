"""Agent programs run unmodified against the endpoint, and what they make the policy say is trained once."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.chat.template import ChatFormat

from .episode import chat_format, play
from .programs import FOLDER, MADE, PROGRAMS, Program
from .record import recorded

pytestmark = [pytest.mark.slow, pytest.mark.programs]


@pytest.fixture(scope="module")
def chat(chat_model: Path) -> ChatFormat:
    return chat_format(chat_model)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
async def test_a_program_does_its_task_and_each_token_has_loss_once(
    program: Program, chat: ChatFormat, tmp_path: Path
) -> None:
    if not program.executable.exists():
        pytest.skip(f"not in {FOLDER}: {program.package}")
    episode = await play(program, tmp_path, chat)
    assert episode.code == 0, episode.output
    assert episode.refused == {}
    assert (tmp_path / "work" / "made.txt").read_text().strip() == MADE
    assert episode.policy.answered == len(program.answers)
    assert episode.trained() == [(-number, token) for number, token in enumerate(episode.policy.generated, 1)]

    before = recorded(program)
    assert before["version"] == program.version, "record it: python -m tests.programs.record"
    assert set(episode.body) == set(before["body"])
    assert len(episode.bodies) == before["requests"]
    samples = sorted(episode.samples, key=lambda sample: len(sample.tokens))  # a title may be asked for first or last
    for sample, (tokens, with_loss) in zip(samples, sorted(before["samples"]), strict=True):
        assert int(sample.loss_mask.sum()) == with_loss
        assert len(sample.tokens) == pytest.approx(tokens, rel=0.03, abs=100)  # names of folders, the date
