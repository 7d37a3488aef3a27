"""SRPO's progress reward: against scikit-learn's parts, as siiRL composes them, and properties of its references."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asyncrl.plugins.rewards.srpo import (
    NEAREST,
    SIIRL,
    Centres,
    Progress,
    ProgressSettings,
    Reference,
    References,
    centres_of,
    dbscan,
    distances,
    shaped,
    spearman,
    srpo_rewards,
)
from tests.examples import examples


def siirls(points, won, eps):  # type: ignore[no-untyped-def]
    """siiRL's `compute_embodied_reward` for one task, of the same parts of scikit-learn and scipy."""
    cluster = pytest.importorskip("sklearn.cluster", reason="scikit-learn is not installed")
    from scipy import special
    from scipy.spatial.distance import cdist
    from sklearn.preprocessing import StandardScaler

    rewards = won.astype(float)
    if not won.any() or won.all():
        return rewards
    scaler = StandardScaler()
    scaled = scaler.fit_transform(points[won])
    labels = cluster.DBSCAN(eps=eps, min_samples=2).fit(scaled).labels_
    means = [scaled[labels == label].mean(0, keepdims=True) for label in sorted(set(labels) - {-1})]
    centres = [scaler.inverse_transform(mean)[0] for mean in means] or [points[won].mean(0)]
    d = cdist(points[~won], np.array(centres)).min(1)
    z = np.full_like(d, 0.5) if np.ptp(d) < 1e-6 else (d - d.min()) / np.ptp(d)
    rewards[~won] = 0.6 * special.expit(10 * (0.5 - z))
    return rewards


def test_siirls_preset_equals_scikit_learns_parts_on_random_batches() -> None:
    draw, clustered = np.random.default_rng(0), 0
    for _ in range(100):
        count, width, eps = int(draw.integers(2, 40)), int(draw.integers(1, 40)), float(draw.choice([0.5, 3.0]))
        points = draw.normal(size=(count, width)) * draw.choice([0.01, 1.0]) + 3 * draw.integers(0, 2, (count, 1))
        points[:, 0] = draw.choice([0.0, 1.0])  # constant, as a scaler may meet it
        won = draw.random(count) < 0.5
        own = srpo_rewards(points, won, ["t"] * count, ProgressSettings(Centres.clusters, eps, low=0.0, high=1.0))
        np.testing.assert_allclose(own, siirls(points, won, eps), atol=1e-9)
        if won.any():
            clustered += len(centres_of(points[won], ProgressSettings(Centres.clusters, eps))) > 1
    assert clustered > 5, "some batches have several clusters"


def test_at_siirls_eps_standardised_successes_form_no_cluster_beyond_a_few_dimensions() -> None:
    draw = np.random.default_rng(0)
    for width in (8, 64, 1408):
        points = draw.normal(size=(16, width)) * 1e-3 + draw.normal(size=width)  # alike up to a thousandth
        scaled = (points - points.mean(0)) / points.std(0)
        assert dbscan(scaled, SIIRL.eps, SIIRL.min_samples).max() == -1
        np.testing.assert_array_equal(centres_of(points, SIIRL), points.mean(0)[None])
        assert len(centres_of(points, NEAREST)) == 16


def test_tasks_of_a_batch_are_apart_and_one_without_a_success_gives_failures_nothing() -> None:
    points = np.array([[0.0], [1.0], [3.0], [0.5], [9.0]])
    won, tasks = np.array([True, False, False, False, False]), ["a", "a", "a", "b", "b"]
    rewards = srpo_rewards(points, won, tasks)
    assert rewards.tolist() == [1.0, *shaped(np.array([1.0, 3.0]), np.array([1.0, 3.0]), SIIRL), 0.0, 0.0]
    assert 0.59 < rewards[1] < 0.6
    assert 0.0 < rewards[2] < 0.01
    order = np.array([4, 2, 0, 1, 3])
    moved = srpo_rewards(points[order], won[order], [tasks[place] for place in order])
    np.testing.assert_array_equal(moved, rewards[order])


points_and_outcomes = st.integers(2, 12).flatmap(
    lambda count: st.tuples(
        arrays.arrays(np.float64, (count, 3), elements=st.floats(-4, 4, width=16)),
        arrays.arrays(np.bool_, count),
        arrays.arrays(np.int64, count, elements=st.integers(0, 12)),
        st.permutations(range(count)),
    )
)


def filled(points, won, versions, order, **kept):  # type: ignore[no-untyped-def]
    """References that took the episodes in `order`, and the episodes."""
    episodes = [Reference(int(version), str(at), points[at]) for at, version in enumerate(versions)]
    references = References(ProgressSettings(low=0.0, high=1.0), **kept)
    for at in order:
        references.add("t", episodes[at], succeeded=bool(won[at]))
    return references, episodes


@given(points_and_outcomes)
@settings(max_examples=examples(40))
def test_references_of_one_version_are_siirls_batch(drawn) -> None:  # type: ignore[no-untyped-def]
    points, won, versions, order = drawn
    references, episodes = filled(points, won, versions * 0, order)
    batch = srpo_rewards(points, won, ["t"] * len(won), ProgressSettings(low=0.0, high=1.0))
    for at in np.flatnonzero(~won):
        assert references.progress("t", [episodes[at]])[0].reward == pytest.approx(batch[at], abs=1e-12)


@given(points_and_outcomes, st.integers(1, 4), st.integers(0, 6))
@settings(max_examples=examples(60))
def test_a_reward_depends_on_what_is_kept_and_not_on_the_order_in_which_it_came(  # type: ignore[no-untyped-def]
    drawn, keep: int, max_staleness: int
) -> None:
    points, won, versions, order = drawn
    first, episodes = filled(points, won, versions, range(len(won)), keep=keep, max_staleness=max_staleness)
    second, _ = filled(points, won, versions, order, keep=keep, max_staleness=max_staleness)
    newest = int(versions.max())
    kept = {
        outcome: sorted(
            (
                each
                for each, own in zip(episodes, won, strict=True)
                if own == outcome and each.version >= newest - max_staleness
            )
        )[-keep:]
        for outcome in (True, False)
    }
    failures = np.flatnonzero(~won)
    together = first.progress("t", [episodes[at] for at in failures])
    for at, found in zip(failures, together, strict=True):
        episode = episodes[at]
        comparable = {
            outcome: [r for r in kept[outcome] if episode.version - max_staleness <= r.version <= episode.version]
            for outcome in kept
        }
        [alone] = second.progress("t", [episode])
        assert (found.references, found.centres, found.failures) == (alone.references, alone.centres, alone.failures)
        assert found.reward == pytest.approx(alone.reward, abs=1e-12)
        if not comparable[True] or not comparable[False]:
            assert found == Progress()
            continue
        assert (found.references, found.failures) == (len(comparable[True]), len(comparable[False]))
        centres = np.array([r.embedding for r in comparable[True]])
        among = distances(np.array([r.embedding for r in comparable[False]]), centres)
        own = shaped(distances(points[at][None], centres), among, ProgressSettings(low=0.0, high=1.0))
        assert found.reward == pytest.approx(float(own[0]))


def test_a_newer_success_is_no_reference_and_an_old_one_is_forgotten() -> None:
    references = References(keep=4, max_staleness=2)
    failure = Reference(5, "f", np.zeros(2))
    references.add("t", failure, succeeded=False)
    references.add("t", Reference(6, "newer", np.ones(2)), succeeded=True)
    references.add("other", Reference(5, "w", np.ones(2)), succeeded=True)
    assert references.progress("t", [failure])[0] == Progress()
    references.add("t", Reference(4, "old", np.ones(2)), succeeded=True)
    assert references.progress("t", [failure])[0].references == 1
    late = Reference(7, "late", np.zeros(2))
    references.add("t", late, succeeded=False)
    assert references.progress("t", [late])[0].references == 1, "that of version 6: version 4 is forgotten"


def test_progress_is_compared_with_rewards_where_somebody_knows_it() -> None:
    references = References()
    references.add("t", Reference(0, "w", np.zeros(1)), succeeded=True)
    for at, progress in enumerate((0.9, 0.5, float("nan"), 0.1)):
        failure = Reference(0, str(at), np.array([float(at + 1)]), progress)
        references.add("t", failure, succeeded=False)
    assert references.progress("t", [failure])[0].correlation == pytest.approx(1.0)
    draw = np.random.default_rng(0)
    left, right = draw.integers(0, 5, 30).astype(float), draw.integers(0, 5, 30).astype(float)
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    assert spearman(left, right) == pytest.approx(stats.spearmanr(left, right).statistic)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"most": 1.0}, "most is 1.0"),
        ({"low": 0.9, "high": 0.5}, "low is 0.9"),
        ({"eps": 0.0}, "eps"),
        ({"min_samples": 0}, "min_samples"),
    ],
)
def test_numbers_out_of_their_bounds_are_refused(wrong: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ProgressSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep is 0"):
        References(keep=0)
