"""The choice of resting prompts follows from the newest measurements alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.setting import ConfigError
from asyncrl.data.curriculum import (
    Curriculum,
    CurriculumFailed,
    OwnCurriculum,
    make_curriculum,
)
from asyncrl.data.settings import CurriculumConfig

MEASURED = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.floats(0, 1)), max_size=30)


def test_the_example_of_the_docstring() -> None:
    curriculum = Curriculum(0.1, 0.9, 2)
    curriculum.measured("e0-7", 1.0)
    assert [epoch for epoch in range(6) if curriculum.skips(f"e{epoch}-7")] == [1, 2]
    assert not curriculum.skips("e1-8"), "nothing is known of it"
    curriculum.measured("e3-7", 0.5)
    assert not any(curriculum.skips(f"e{epoch}-7") for epoch in range(6))


def test_the_bounds_themselves_are_within_and_an_older_epoch_replaces_nothing() -> None:
    curriculum = Curriculum(0.25, 0.75, 1)
    for row, success in enumerate((0.25, 0.75, 0.125, 0.875)):
        curriculum.measured(f"e2-{row}", success)
        curriculum.measured(f"e1-{row}", 0.5)
    assert [curriculum.skips(f"e3-{row}") for row in range(4)] == [False, False, True, True]
    assert not any(curriculum.skips(f"e4-{row}") for row in range(4))
    curriculum.measured("of my own stream", 1.0)
    assert not curriculum.skips("of my own stream")


def test_a_weighted_row_is_used_in_its_share_of_the_epochs() -> None:
    """Besides the range: of rows that are right half the time none rests, of easy and hard ones more and more."""
    rows, least = range(4000), 0.2
    for success, share in ((0.5, 1.0), (0.25, 0.8), (0.75, 0.8), (1.0, least), (0.0, least)):
        curriculum = Curriculum(0.0, 1.0, 2, least_weight=least)
        for row in rows:
            curriculum.measured(f"e0-{row}", success)
        assert not any(curriculum.skips(f"e0-{row}") for row in rows), "it was used in this epoch"
        for epoch in (1, 7):
            used = sum(not curriculum.skips(f"e{epoch}-{row}") for row in rows) / len(rows)
            assert used == pytest.approx(share, abs=0.03)
    skipped = [{row for row in rows if curriculum.skips(f"e{epoch}-{row}")} for epoch in (1, 2)]
    assert 0.5 < len(skipped[0] & skipped[1]) / len(rows) < 0.75, "each epoch draws anew"
    assert CurriculumConfig(least_weight=least).is_on


@given(MEASURED)
def test_one_made_of_its_state_decides_as_it_does(measured: list[tuple[int, int, float]]) -> None:
    curriculum = Curriculum(0.2, 0.8, 2, least_weight=0.5)
    for epoch, row, success in measured:
        curriculum.measured(f"e{epoch}-{row}", success)
    again = Curriculum(0.2, 0.8, 2, json.loads(json.dumps(curriculum.state())), 0.5)
    ids = [f"e{epoch}-{row}" for epoch in range(10) for row in range(5)]
    assert [again.skips(each) for each in ids] == [curriculum.skips(each) for each in ids]
    assert again.state() == curriculum.state() == sorted(curriculum.state())


OWN = """
class Thirds:
    "A row that was all right rests in every third epoch."

    def __init__(self, start=1):
        self.start, self.right = start, {}

    def measured(self, row, epoch, success):
        if success >= 0.5:
            self.right[row] = max(epoch, self.right.get(row, 0))

    def skips(self, row, epoch):
        return row in self.right and epoch > self.right[row] and epoch % 3 == self.start

    def state(self):
        return {str(row): epoch for row, epoch in self.right.items()}

    def restore(self, state):
        self.right = {int(row): epoch for row, epoch in state.items()}


class NoBool(Thirds):
    def skips(self, row, epoch):
        return "yes"


class NotPlain(Thirds):
    def state(self):
        return {1, 2}


class NumbersAsKeys(Thirds):
    def state(self):
        return self.right


class AnswersOtherwise(Thirds):
    def skips(self, row, epoch):
        return bool(self.right)

    def state(self):
        return {}


class TooLate(Thirds):
    def skips(self, row, epoch):
        raise TimeoutError("of my own")


class Forgets(Thirds):
    def measured(self, row, epoch, success):
        self.right[row] = epoch

    def restore(self, state):
        self.right = {}


class OfEarlierVersions:
    def rests(self, row, epoch):
        return False
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], CurriculumConfig]:
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: CurriculumConfig(path=f"{tmp_path / 'own.py'}:{name}", args={"start": 2})


def test_a_class_of_ones_own_decides_and_goes_on_from_its_state(own: Callable[[str], CurriculumConfig]) -> None:
    settings = own("Thirds")
    assert settings.is_on
    curriculum = make_curriculum(settings)
    assert isinstance(curriculum, OwnCurriculum)
    curriculum.measured("e0-4", 1.0)
    curriculum.measured("e0.25", 0.5)
    curriculum.measured("of my own stream", 1.0)
    again = make_curriculum(settings, json.loads(json.dumps(curriculum.state())))
    for each in (curriculum, again):
        assert [epoch for epoch in range(7) if each.skips(f"e{epoch}-4")] == [2, 5]
        assert not any(each.skips(name) for name in ("e2-5", "e2-6", "of my own stream"))


@pytest.mark.timeout(60)
def test_a_method_that_hangs_holds_its_process_for_a_limit_only(
    own: Callable[[str], CurriculumConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.data.curriculum.CALL_LIMIT_S", 0.05)
    curriculum, hang = cast(OwnCurriculum, make_curriculum(own("Thirds"))), threading.Event()
    monkeypatch.setattr(curriculum._own, "skips", lambda row, epoch: hang.wait())
    with pytest.raises(CurriculumFailed, match=r"own\.py:Thirds': skips did not return within 0\.05 s"):
        curriculum.skips("e0-4")
    with pytest.raises(CurriculumFailed, match="measured is not called: an earlier call has not returned"):
        curriculum.measured("e0-4", 1.0)
    hang.set()
    curriculum._running.result(60)
    curriculum.measured("e0-4", 1.0)
    assert curriculum.state()["state"] == {"4": 0}


def test_a_state_of_another_curriculum_is_not_taken(
    own: Callable[[str], CurriculumConfig], caplog: pytest.LogCaptureFixture
) -> None:
    built_in = Curriculum(0.1, 0.9, 2)
    built_in.measured("e0-4", 1.0)
    assert not make_curriculum(own("Thirds"), built_in.state()).skips("e2-4")
    assert "begins anew: what was kept is of ''" in caplog.text
    settings = CurriculumConfig(low=0.1, high=0.9)
    caplog.clear()
    assert make_curriculum(settings, built_in.state()).skips("e1-4"), "this one goes on"
    assert not caplog.records
    theirs = make_curriculum(own("Thirds"))
    theirs.measured("e0-4", 1.0)
    assert not make_curriculum(settings, theirs.state()).skips("e1-4")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoBool", r"skips\(0, 1\) failed: TypeError\(\"it returned 'yes', which is no bool\"\)"),
        ("NotPlain", r"state\(\) failed: TypeError\('state\(\) is a set; state must be plain data for JSON"),
        ("NumbersAsKeys", r"state\(\) has the key 0, which JSON would restore as text"),
        ("AnswersOtherwise", r"restore\(state\) failed: ValueError\('it is another one afterwards'\)"),
        ("TooLate", r"skips\(0, 1\) failed: TimeoutError\('of my own'\)"),
        ("Forgets", r"restore\(state\) failed: ValueError\('it is another one afterwards'\)"),
        ("OfEarlierVersions", r"its method `rests` is called `skips` now; rename it"),
        ("None_", r"defines no 'None_'"),
    ],
)
def test_one_that_cannot_be_kept_is_refused_before_the_start(
    own: Callable[[str], CurriculumConfig], name: str, message: str
) -> None:
    settings = own(name)
    with pytest.raises(ConfigError, match=rf"^dataset\.curriculum\.path=.*{message}"):
        OwnCurriculum(settings.path, settings.args).check()


def test_one_that_cannot_be_made_is_refused(own: Callable[[str], CurriculumConfig]) -> None:
    with pytest.raises(ConfigError, match=r"^dataset\.curriculum\.args=\{'begin': 2\}: .*no parameter 'begin'"):
        OwnCurriculum(own("Thirds").path, {"begin": 2})


def test_a_right_one_passes(own: Callable[[str], CurriculumConfig]) -> None:
    OwnCurriculum(own("Thirds").path, {}).check()
