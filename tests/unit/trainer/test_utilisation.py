"""The rank's speed in the calls of a step, as a share of what its device reaches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from asyncrl.observe.settings import ProfileConfig
from asyncrl.trainer.rank import measures as rank_measures
from asyncrl.trainer.rank.measures import StepMeasures, measured_peak, peak_flops
from asyncrl.trainer.rank.profile import StepProfile


def _engine(flops: float | None) -> Any:
    return cast(Any, SimpleNamespace(flops=flops))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The module's clock, in `now`."""
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(rank_measures.time, "perf_counter", lambda: made.now)
    return made


def test_a_step_s_operations_are_divided_by_the_seconds_of_its_calls(clock: SimpleNamespace) -> None:
    actor, reference = _engine(100.0), _engine(0.0)
    rank = StepMeasures({"actor": actor, "ref": reference}, 1000.0, torch.device("cpu"))
    for role in (actor, reference):
        with rank.computing():
            clock.now += 1.0
            role.flops += 500.0
        clock.now += 7.0  # waits for the master
    ended = rank.end()
    assert (ended.flops_per_s, ended.mfu) == (550.0, 0.55)
    with rank.computing():
        clock.now += 4.0
        actor.flops += 1000.0
    ended = rank.end()
    assert (ended.flops_per_s, ended.mfu) == (250.0, 0.25)
    assert rank.gauges() == {"computing_s": 6.0, "peak_flops": 1000.0, "flops_total": 2100.0, "mfu": 0.25}


def test_a_role_that_is_not_counted_leaves_no_figure(clock: SimpleNamespace) -> None:
    rank = StepMeasures({"actor": _engine(5.0), "ref": _engine(None)}, 1000.0, torch.device("cpu"))
    ended = rank.end()
    assert ended.flops_per_s is None
    assert ended.mfu is None
    assert rank.gauges() == {"computing_s": 0.0, "peak_flops": 1000.0}


def test_a_step_ends_with_its_speed_peak_memory_and_profile(clock: SimpleNamespace, tmp_path: Path) -> None:
    actor, cpu = _engine(0.0), torch.device("cpu")
    profile = StepProfile(ProfileConfig(steps=[2], ranks=[0]), 0, tmp_path / "profile", cpu)
    measures = StepMeasures({"actor": actor}, 1000.0, cpu, profile)
    for step in (1, 2):
        measures.begin(step)
        with measures.call("actor_train"):
            clock.now += 2.0
            actor.flops += 500.0
        with measures.computing():
            clock.now += 3.0
        ended = measures.end()
        assert (ended.flops_per_s, ended.mfu) == (100.0, 0.1)
        assert ended.memory_bytes > 1 << 20
    assert [file.name for file in (tmp_path / "profile").iterdir()] == ["step-2.rank-0.trace.json.gz"]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 9.89e14),
        ("NVIDIA H100 PCIe", 7.56e14),
        ("NVIDIA A100-SXM4-80GB", 3.12e14),
        ("NVIDIA H20", 1.48e14),
        ("NVIDIA GH200 480GB", 9.89e14),
        ("NVIDIA L4", 1.21e14),
        ("NVIDIA L40", 7.0),  # no name of the table
    ],
)
def test_known_gpus_have_their_maker_s_peak(name: str, peak: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(rank_measures, "measured_peak", lambda device, dtype: 7.0)
    assert peak_flops(torch.device("cuda", 0), torch.bfloat16) == peak
    assert peak_flops(torch.device("cuda", 0), torch.float32) == 7.0


def test_other_peaks_are_those_of_the_fastest_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([2.0, 0.5, 1.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(rank_measures, "_seconds", lambda matrix: next(seconds))
    assert measured_peak(torch.device("cpu"), torch.float32) == 2 * 512**3 / 0.5
