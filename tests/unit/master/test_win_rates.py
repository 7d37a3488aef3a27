"""Win rates against the members of a prioritised pool: from trained rollouts, frozen with a version, in checkpoints."""

from __future__ import annotations

import json

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.settings import PickVersion, PolicyConfig, VersionPoolConfig
from asyncrl.master.win_rates import WinRates
from asyncrl.trainer.messages import RolloutRecord

POOL = VersionPoolConfig(every=2, keep=2, pick=PickVersion.prioritised)


def rollout(won: float | None, oldest: int = 2, newest: int = 2, name: str = "past") -> RolloutRecord:
    met = {f"policy_server/{name}/oldest_version": float(oldest), f"policy_server/{name}/newest_version": float(newest)}
    reported = {} if won is None else {f"agent/won/{name}": won}
    return RolloutRecord("r", "e0-0", 0, 0, 0, {0: 1}, (2,), (1,), (1.0,), (False,), (0,), metrics=met | reported)


def test_a_rate_is_the_mean_of_what_agents_report_between_a_half_and_that() -> None:
    rates = WinRates({"past": POOL})
    assert rates.at(0) == {"past": {}}
    rates.trained(3, [rollout(1.0), rollout(0.75), rollout(7.0), rollout(-1.0)])
    assert rates.at(3)["past"] == {2: pytest.approx((1 + 2.75) / 6)}
    rates.trained(4, [rollout(0.0, 4, 4)])
    assert rates.at(4)["past"][4] == pytest.approx(1 / 3)
    assert rates.at(3)["past"] == {2: pytest.approx((1 + 2.75) / 6)}, "those when version 3 was made"


def test_a_rollout_that_met_two_members_or_reports_nothing_counts_for_none() -> None:
    rates = WinRates({"past": POOL})
    rates.trained(4, [rollout(1.0, 2, 4), rollout(None), rollout(1.0, name="other")])
    assert rates.at(4) == {"past": {}}


def test_a_member_that_left_the_pool_is_forgotten() -> None:
    rates = WinRates({"past": POOL})
    rates.trained(4, [rollout(1.0, 2, 2), rollout(1.0, 0, 0)])
    rates.trained(6, [])
    assert rates.at(6)["past"].keys() == {0}


def test_a_server_that_holds_its_member_chooses_by_the_rates_of_then_also_after_a_restart() -> None:
    pool = VersionPoolConfig(every=2, keep=4, hold=5, pick=PickVersion.prioritised)
    rates = WinRates({"past": pool})
    for version in range(1, 18):
        rates.trained(version, [rollout(1.0, version - version % 2, version - version % 2)])
        resumed = WinRates({"past": pool, "new": pool})
        resumed.restore(json.loads(json.dumps(rates.state())))
        assert resumed.at(version) == rates.at(version) | {"new": {}}
        since = version - version % 5
        choices = {pool.choose(each, 1, 0, rates.at(version)["past"]) for each in (since, version)}
        assert len(choices) == 1
        resumed.trained(version + 1, [])
        rates.restore(rates.state())
    restored = WinRates({"past": pool})
    restored.restore(None)
    assert restored.at(17) == {"past": {}}, "of a checkpoint of an earlier version of asyncrl"


def test_only_prioritised_pools_are_counted() -> None:
    policies = [PolicyConfig("past", versions=POOL), PolicyConfig("uniform"), PolicyConfig("judge", trained=True)]
    assert WinRates.of_run(ExperimentConfig(policies=policies)).at(0) == {"past": {}}
