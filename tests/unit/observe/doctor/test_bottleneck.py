"""The doctor on virtual runs whose bottleneck is known."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.observe.doctor import Diagnosis, examine
from asyncrl.observe.doctor.bottleneck import bottlenecks
from asyncrl.observe.doctor.finding import Finding, Level
from asyncrl.observe.doctor.measured import measure
from asyncrl.observe.history import History
from tests.examples import examples
from tests.unit.observe.doctor.virtual_run import Knobs, VirtualRun

INJECTED = {
    "slow-generation": Knobs(speed=600),
    "slow-reward": Knobs(reward_s=3.0),
    "slow-environment": Knobs(env_s=3.0),
    "eta-too-small": Knobs(eta=0, train_s=1.0),
    "too-few-slots": Knobs(slots=2),
    "evaluation": Knobs(eval_samples=400),
    "trainer": Knobs(train_s=5.0),
    "publish": Knobs(publish_s=5.0),
    "server-batch-too-small": Knobs(max_running=8),
    "kv-cache-too-small": Knobs(max_tokens=1000),
    "slow-updates": Knobs(update_s=1.5, eta=1),
    "shared-devices": Knobs(colocated=True, train_s=1.5),
}
RELIEF = {
    "slow-generation": lambda k: replace(k, speed=2 * k.speed, sample_speed=2 * k.sample_speed),
    "slow-reward": lambda k: replace(k, reward_s=k.reward_s / 4, slots=2 * k.slots),
    "slow-environment": lambda k: replace(k, env_s=k.env_s / 4, slots=2 * k.slots),
    "eta-too-small": lambda k: replace(k, eta=k.eta + 1),
    "too-few-slots": lambda k: replace(k, slots=4 * k.slots),
    "evaluation": lambda k: replace(k, eval_samples=0),
    "trainer": lambda k: replace(k, train_s=k.train_s / 4),
    "publish": lambda k: replace(k, publish_s=k.publish_s / 4),
    "server-batch-too-small": lambda k: replace(k, max_running=4 * k.max_running),
    "kv-cache-too-small": lambda k: replace(k, max_tokens=4 * k.max_tokens),
    "slow-updates": lambda k: replace(k, update_s=k.update_s / 4),
    "shared-devices": lambda k: replace(k, colocated=False),
}
"""What the advice of each finding changes, generously."""


def played(knobs: Knobs, folder: Path) -> tuple[float, Diagnosis]:
    step_s = VirtualRun(knobs, folder).play()
    return step_s, examine(History(folder))


def bottleneck(diagnosis: Diagnosis) -> Finding | None:
    """The stage that sets the pace."""
    return next((each for each in diagnosis.findings if each.level is Level.bottleneck), None)


@pytest.mark.parametrize("kind", INJECTED)
def test_an_injected_cause_is_named_and_its_relief_helps(kind: str, tmp_path: Path) -> None:
    knobs = INJECTED[kind]
    step_s, diagnosis = played(knobs, tmp_path / "ill")
    found = bottleneck(diagnosis)
    assert found is not None
    assert found.kind == kind, [each.line() for each in diagnosis.findings]
    relieved_s, _ = played(RELIEF[kind](knobs), tmp_path / "well")
    assert relieved_s < 0.9 * step_s


def test_at_best_is_no_promise_that_the_run_beats(tmp_path: Path) -> None:
    """What the doctor promises is a lower bound: the stage that comes next is not known."""
    for number, (kind, change) in enumerate(
        {
            "slow-reward": {"slots": 48},
            "too-few-slots": {"slots": 48},
            "evaluation": {"eval_samples": 0},
            "shared-devices": {"colocated": False},
        }.items()
    ):
        _, diagnosis = played(INJECTED[kind], tmp_path / f"ill{number}")
        after_s, _ = played(replace(INJECTED[kind], **change), tmp_path / f"well{number}")  # type: ignore[arg-type]
        found = bottleneck(diagnosis)
        assert found is not None
        assert found.at_best_s is not None
        assert found.at_best_s < 1.05 * after_s


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("slow-reward", {"reward_s": 3.0}),
        ("server-batch-too-small", {"max_running": 8}),
        ("too-few-slots", {"slots": 2}),
    ],
)
def test_what_makes_generation_long_on_shared_devices_comes_before_sharing_them(
    kind: str, change: dict[str, Any], tmp_path: Path
) -> None:
    _, diagnosis = played(replace(Knobs(colocated=True), **change), tmp_path / "ill")
    assert next(each.kind for each in diagnosis.findings if each.kind in RELIEF) == kind
    assert "eta-too-small" not in [each.kind for each in diagnosis.findings]


def random_knobs(seed: int) -> Knobs:
    rng = random.Random(seed)
    knobs = Knobs(
        eta=rng.choice([1, 2, 4]),
        slots=rng.choice([2, 6, 16, 32]),
        speed=rng.choice([2000, 8000]),
        reward_s=rng.choice([0.01, 0.01, 2.0]),
        env_s=rng.choice([0.0, 0.0, 2.0]),
        train_s=rng.choice([0.1, 0.5, 3.0]),
        publish_s=rng.choice([0.05, 0.05, 1.5]),
        eval_samples=rng.choice([0, 0, 300]),
        max_running=rng.choice([16, 256]),
        max_tokens=rng.choice([1200, 40_000]),
        colocated=seed % 5 == 4,
        seed=seed,
    )
    if knobs.eval_samples:  # the virtual server does not hold evaluations back
        knobs = replace(knobs, max_running=1024, max_tokens=1_000_000)
    return knobs


def test_the_named_stage_is_one_whose_relief_gains_most(tmp_path: Path) -> None:
    """In all but one of the random runs, or there is none whose relief alone gains much."""
    wrong = []
    for seed in range(examples(24)):
        knobs = random_knobs(seed)
        step_s, diagnosis = played(knobs, tmp_path / f"{seed}")
        gains = {
            kind: step_s - VirtualRun(relieved, tmp_path / f"{seed}-{kind}").play()
            for kind, relieve in RELIEF.items()
            if (relieved := relieve(knobs)) != knobs
        }
        named = next((each.kind for each in diagnosis.findings if each.kind in RELIEF), None)
        most = max(gains.values())
        if most > 0.25 * step_s and (named is None or gains.get(named, 0.0) < 0.6 * most):
            wrong.append((seed, named, gains))
    assert len(wrong) <= 1, wrong


@pytest.mark.parametrize(
    ("tokens", "minibatches", "on_gpu", "no_core", "advised"),
    [
        (7_000, 4, False, 0.0, "More threads (trainer.threads) or fewer minibatches (trainer.ppo_minibatches=4 now)"),
        (7_000, 1, False, 0.0, "More threads (trainer.threads)."),
        (100_000, 4, True, 0.0, "More training ranks or larger micro-batches (trainer.tokens_per_micro_batch)."),
        (100_000, 4, False, 0.5, "Fewer servers, more cores or larger micro-batches (trainer.tokens_per_micro_batch)."),
    ],
)
def test_what_is_advised_for_a_slow_trainer_would_change_something(
    tokens: int, minibatches: int, on_gpu: bool, no_core: float, advised: str, tmp_path: Path
) -> None:
    """Larger micro-batches change nothing where a minibatch has one; more processes need free cores."""
    VirtualRun(INJECTED["trainer"], tmp_path).play()
    measured = measure(History(tmp_path))
    assert measured is not None
    settings = {"trainer.ppo_minibatches": minibatches, "trainer.tokens_per_micro_batch": 16_384}
    settings["rollout.pacing"] = "deadline"
    given = replace(measured, settings=settings, rank_tokens=tokens, on_gpu=on_gpu, no_core=no_core)
    assert next(bottlenecks(given)).advice.startswith(advised)
