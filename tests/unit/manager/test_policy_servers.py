"""Pools of older versions: which are members, which are played, and that the gate never depends on their servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.comm.http_client import JsonHttp
from asyncrl.comm.names import GENERATION_SERVER, POLICY_SERVER, PublishedVersion
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.inference.settings import BACKENDS
from asyncrl.manager import messages as m
from asyncrl.manager.fleet import policy_fleets
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.policy_fleets import PolicyFleets
from asyncrl.manager.fleet.servers import BeginUpdate, Target
from asyncrl.manager.messages import ServerState
from asyncrl.manager.service import ManagerService
from asyncrl.manager.settings import PickVersion, PolicyConfig, UpdateMode, VersionPoolConfig
from asyncrl.master.policy_versions import Publishing
from asyncrl.trainer.messages import CollectWeights, Publish, PublishedWeights
from asyncrl.weights.manifest import Manifest, ManifestError, write_manifest
from asyncrl.weights.transports.base import ManagerEnd

POOLS = st.builds(
    VersionPoolConfig,
    every=st.integers(1, 7),
    keep=st.integers(1, 4),
    pick=st.sampled_from(PickVersion),
    hold=st.integers(1, 20),
)


@given(POOLS, st.integers(0, 60))
def test_members_are_the_newest_of_every_nth_version(pool: VersionPoolConfig, newest: int) -> None:
    members = pool.members(newest)
    assert members == [version for version in range(1, newest + 1) if version % pool.every == 0][-pool.keep :]


@given(POOLS, st.integers(0, 60), st.integers(0, 3), st.integers(0, 3))
def test_a_server_plays_a_member_whose_weights_are_kept_and_a_resumed_run_the_same(
    pool: VersionPoolConfig, newest: int, seed: int, server: int
) -> None:
    chosen = pool.choose(newest, seed, server)
    assert chosen == VersionPoolConfig(pool.every, pool.keep, pool.pick, pool.hold).choose(newest, seed, server)
    if chosen is None:
        assert newest < pool.every + pool.hold
    else:
        assert chosen in pool.needed(newest)
        assert {*pool.members(newest)} <= pool.needed(newest)
    since = newest - newest % pool.hold
    assert chosen == pool.choose(since, seed, server), "it holds the member that it chose"


def chosen(pool: VersionPoolConfig, newest: int, server: int, rates: Mapping[int, float] | None = None) -> int:
    """The version that a server plays where the pool has members."""
    version = pool.choose(newest, 1, server) if rates is None else pool.choose(newest, 1, server, rates)
    assert version is not None
    return version


def test_the_members_of_a_pool_are_drawn_alike_and_differ_between_servers() -> None:
    pool = VersionPoolConfig(every=1, keep=4)
    drawn = [chosen(pool, newest, server) - newest for newest in range(4, 404) for server in (0, 1)]
    assert all(150 < drawn.count(-back) < 250 for back in range(4))
    assert drawn[::2] != drawn[1::2]


def test_members_that_win_more_often_are_chosen_more_often() -> None:
    pool = VersionPoolConfig(every=1, keep=3, pick=PickVersion.prioritised)
    rates = [{newest - 2: 0.5, newest - 1: 0.75, newest: 0.99} for newest in range(3, 2003)]
    drawn = [newest - chosen(pool, newest, 0, rate) for newest, rate in zip(range(3, 2003), rates, strict=True)]
    assert drawn.count(2) / 2000 == pytest.approx(0.8, abs=0.04)  # 0.25 : 0.0625 : 0.0001
    assert drawn.count(0) < 10
    unknown = [newest - chosen(pool, newest, 0) for newest in range(3, 2003)]
    assert all(unknown.count(back) / 2000 == pytest.approx(1 / 3, abs=0.05) for back in range(3))


def test_a_server_of_a_prioritised_pool_is_assigned_by_the_rates_of_the_announcement(tmp_path: Path) -> None:
    pool = VersionPoolConfig(every=1, keep=3, pick=PickVersion.prioritised)
    config = ExperimentConfig(policies=[PolicyConfig("past", versions=pool)])
    fleets = fleets_of(config, service_of(["past"]))
    for version in range(1, 8):
        (tmp_path / f"v{version}").mkdir()
        write_manifest(tmp_path / f"v{version}", Manifest("actor", version, {}))
    fleets.registered(POLICY_SERVER, {0: ("http://past", 0)})
    played = []
    for newest in range(3, 8):
        published = PublishedVersion(newest, "", {"past": {newest: 1 - 1e-9, newest - 1: 1 - 1e-9, newest - 2: 0.1}})
        rates = PublishedVersion.decode(published.encode()).win_rates
        asyncio.run(fleets.published(Target(newest, str(tmp_path / f"v{newest}")), rates))
        (order,) = fleets._fleets["past"].decisions.poll(0.0, {})
        assert isinstance(order, BeginUpdate)
        fleets._fleets["past"].decisions.succeeded(0, order.attempt)
        played.append(order.target.version)
    assert played == [1, 2, 3, 4, 5]


def test_a_server_of_a_pool_goes_back_to_an_older_version_and_returns_there_after_its_death() -> None:
    fleet = FleetDecisions(UpdateMode.finish, 10.0)
    fleet.register(0, "http://a", 0, 0.0)
    for version in (20, 10):
        fleet.targets.assign(0, Target(version, f"/v{version}"))
        assert fleet.poll(0.0, {0: 1}) == [], "it is drained first"
        (order,) = fleet.poll(0.0, {})
        assert isinstance(order, BeginUpdate)
        assert order.target.version == version
        fleet.succeeded(0, order.attempt)
    fleet.deregister(0)
    fleet.register(0, "http://b", 0, 1.0)
    assert fleet.servers[0].state is ServerState.QUARANTINED
    (order,) = fleet.poll(1.0, {})
    assert isinstance(order, BeginUpdate)
    assert order.target.version == 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_runs_own_servers_are_taken_to_do_what_its_engine_does(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[tuple[bool, bool]]()

    def note(*_: object, keeps_pictures: bool, pause_ends_requests: bool, **__: object) -> None:
        made.append((keeps_pictures, pause_ends_requests))

    monkeypatch.setattr(policy_fleets, "ServerUpdater", note)
    config = ExperimentConfig()
    config.generation.backend = backend
    config.policies = [PolicyConfig("past"), PolicyConfig("judge", url="http://127.0.0.1:9")]
    fleets_of(config, service_of())
    own = (config.generation.engine.keeps_pictures, config.generation.engine.pause_ends_requests)
    assert made == [own, own, (False, False)]


def fleets_of(config: ExperimentConfig, service: ManagerService) -> PolicyFleets:
    http = JsonHttp(None)
    return PolicyFleets(config, service, http, ManagerEnd(), log=logging.getLogger(), clock=lambda: 0.0)


def service_of(policies: Sequence[str] = ("past", "judge"), trained: Sequence[str] = ()) -> ManagerService:
    service = ManagerService(
        batch_size=2,
        max_staleness=1,
        routing="least_requests",
        lease_s=60.0,
        order=DataOrder(100, 0),
        policies=policies,
        trained=trained,
        clock=lambda: 0.0,
    )
    service.begin(m.RunBegin(version=5))
    service.router.update(0, "http://policy", 5, True)
    service.routes_changed(5)
    return service


def place(service: ManagerService, policy: str, rollout: str = "r") -> str | None:
    asks = [m.RouteRequest(1, 1, 1, request_id=f"{rollout}/{policy}", rollout_id=rollout, policy=policy)]
    request = m.ScheduleRequest(worker="rollout_worker/0", manager=service.number, timeout_s=0.0, requests=asks)
    placed = asyncio.run(service.schedule_request(request)).scheduled
    return placed[f"{rollout}/{policy}"].url if placed else None


def test_an_opponent_answers_whatever_its_version_and_never_moves_the_gate() -> None:
    service = service_of()
    before = service.gate_state()
    assert place(service, "past") is None, "no server of it is there"
    service.routes.router_of("past").update(0, "http://past", 1, True)
    service.routes_changed(None)
    assert place(service, "past") == "http://past"
    assert place(service, "") == "http://policy"
    assert service.gate_state() == before
    service.worker_died("rollout_worker/0")
    assert [service.routes.router_of(policy).placed for policy in ("", "past")] == [0, 0]


def test_a_policy_that_the_run_lacks_is_refused_by_name() -> None:
    with pytest.raises(m.BadRequest, match=r"'future' is not one of `policies`, which has past, judge"):
        place(service_of(), "future")


class _Ranks:
    """Records which versions are kept."""

    def __init__(self) -> None:
        self.master = "m"
        self.kept: list[tuple[str, set[int]]] = []

    async def some(self, actors: object, request: Publish) -> list[PublishedWeights]:
        return [PublishedWeights(f"/{request.role}/v{request.version}")]

    async def all(self, request: CollectWeights) -> None:
        self.kept.append((request.role, set(request.keep)))


class _Announcer:
    announced, put_off = 6, ()


def test_weights_of_a_pools_members_stay_over_steps_and_restarts() -> None:
    ranks = _Ranks()
    pools = [VersionPoolConfig(every=2, keep=2)]
    publishing = Publishing(cast(Any, ranks), {"actor": [], "judge": []}, cast(Any, _Announcer()), pools)
    assert asyncio.run(publishing.publish(7, {1}, to_disk=True)) == "/actor/v7"
    asyncio.run(publishing.collect(7, {7}))
    kept = [{1, 4, 6, 7}, {4, 6, 7}]
    assert ranks.kept == [(role, versions) for versions in kept for role in ("actor", "judge")]


def test_the_gate_counts_by_the_least_version_of_all_trained_policies_servers() -> None:
    config = ExperimentConfig(policies=[PolicyConfig("judge", trained=True), PolicyConfig("past")])
    fleets = fleets_of(config, service_of())
    own = fleets.own.decisions
    fleets.registered(GENERATION_SERVER, {0: ("http://own", 0)})
    assert fleets.served_version() is None, "the judge has no server"
    fleets.registered(POLICY_SERVER, {0: ("http://judge", 0), 1: ("http://past", 0)})
    assert [each.url for each in own.servers] == ["http://own"]
    assert fleets.served_version() == 0
    asyncio.run(fleets.published(Target(6, "/weights/actor/v6")))
    (order,) = own.poll(0.0, {})
    assert isinstance(order, BeginUpdate)
    assert order.target == Target(6, "/weights/actor/v6")
    own.succeeded(0, order.attempt)
    assert (own.served_version, fleets.served_version()) == (6, 0)
    judge = fleets._fleets["judge"].decisions
    (order,) = judge.poll(0.0, {})
    assert isinstance(order, BeginUpdate)
    assert order.target == Target(6, "/weights/judge/v6")
    judge.succeeded(0, order.attempt)
    assert fleets.served_version() == 6
    assert fleets.versions_in_use() == {0, 6}


def test_an_answer_of_a_trained_policy_is_no_older_than_its_rollouts_admission() -> None:
    service = service_of(trained=["past"])
    service.routes.router_of("past").update(0, "http://past", 1, True)
    asks = [m.RouteRequest(1, 1, 1, request_id="r/past", rollout_id="r", policy="past", min_version=5)]
    request = m.ScheduleRequest(worker="rollout_worker/0", manager=service.number, timeout_s=0.0, requests=asks)
    assert not asyncio.run(service.schedule_request(request)).scheduled
    service.routes.router_of("past").update(0, "http://past", 5, True)
    assert asyncio.run(service.schedule_request(request)).scheduled


@pytest.mark.parametrize("missing", ["actor", "judge"])
def test_a_version_is_refused_unless_it_is_there_of_every_trained_policy(tmp_path: Path, missing: str) -> None:
    config = ExperimentConfig(policies=[PolicyConfig("judge", trained=True)])
    fleets = fleets_of(config, service_of(["judge"]))
    for role in ("actor", "judge"):
        if role != missing:
            (tmp_path / role / "v1").mkdir(parents=True)
            write_manifest(tmp_path / role / "v1", Manifest(role, 1, {}))
    target = Target(1, str(tmp_path / "actor" / "v1"))
    if missing == "judge":
        with pytest.raises(ManifestError, match="judge/v1"):
            fleets.check(target)
    else:
        fleets.check(target)
