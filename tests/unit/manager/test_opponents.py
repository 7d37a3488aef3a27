"""Pools of older versions: which are members, which are played, and that the gate never depends on their servers."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.manager import messages as m
from asyncrl.manager.fleet.decisions import BeginUpdate, FleetDecisions, ServerState, Target, UpdateMode
from asyncrl.manager.service import ManagerService
from asyncrl.manager.settings import PickVersion, VersionPoolConfig
from asyncrl.master.peers.policy_versions import Publishing
from asyncrl.plugins.datasets.queue.order import DataOrder
from asyncrl.trainer.messages import CollectWeights, PublishedWeights

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


def test_the_members_of_a_pool_are_drawn_alike_and_differ_between_servers() -> None:
    pool = VersionPoolConfig(every=1, keep=4)
    drawn = [pool.choose(newest, 1, server) - newest for newest in range(4, 404) for server in (0, 1)]
    assert all(150 < drawn.count(-back) < 250 for back in range(4))
    assert drawn[::2] != drawn[1::2]


def test_a_server_of_a_pool_goes_back_to_an_older_version_and_returns_there_after_its_death() -> None:
    fleet = FleetDecisions(UpdateMode.finish, 10.0)
    fleet.register(0, "http://a", 0, 0.0)
    for version in (20, 10):
        fleet.assign(0, Target(version, f"/v{version}"))
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


def service_of() -> ManagerService:
    service = ManagerService(
        batch_size=2,
        max_staleness=1,
        routing="least_requests",
        lease_s=60.0,
        order=DataOrder(100, 0),
        policies=["past"],
        clock=lambda: 0.0,
    )
    service.begin(m.RunReport(version=5))
    service.router.update(0, "http://policy", 5, True)
    service.routes_changed(5)
    return service


def place(service: ManagerService, policy: str, rollout: str = "r") -> m.ScheduledRequest | None:
    asks = [m.RouteRequest(1, 1, 1, request_id=f"{rollout}/{policy}", rollout_id=rollout, policy=policy)]
    request = m.ScheduleRequest(worker="rollout_worker/0", manager=service.number, timeout_s=0.0, requests=asks)
    placed = asyncio.run(service.schedule_request(request)).scheduled
    return placed[0] if placed else None


def test_an_opponent_answers_whatever_its_version_and_never_moves_the_gate() -> None:
    service = service_of()
    before = service.gate_state()
    assert place(service, "past") is None, "no server of it is there"
    service.router_of("past").update(0, "http://past", 1, True)
    service.routes_changed(None)
    assert place(service, "past").url == "http://past"
    assert place(service, "").url == "http://policy"
    assert service.gate_state() == before
    service.worker_died("rollout_worker/0")
    assert [service.router_of(policy).placed for policy in ("", "past")] == [0, 0]


def test_a_policy_that_the_run_lacks_is_refused_by_name() -> None:
    with pytest.raises(m.BadRequest, match=r"'future' is not one of `policies`, which has past"):
        place(service_of(), "future")


class _Ranks:
    """Records which versions are kept."""

    def __init__(self) -> None:
        self.master, self.kept = "m", []

    async def some(self, actors: object, request: object) -> list[PublishedWeights]:
        return [PublishedWeights("/v")]

    async def all(self, request: CollectWeights) -> None:
        self.kept.append(set(request.keep))


class _Announcer:
    announced, put_off = 6, ()


def test_weights_of_a_pools_members_stay_over_steps_and_restarts() -> None:
    ranks = _Ranks()
    publishing = Publishing(ranks, [], _Announcer(), [VersionPoolConfig(every=2, keep=2)])
    asyncio.run(publishing.publish(7, {1}, to_disk=True))
    asyncio.run(publishing.forget_others(7))
    assert ranks.kept == [{1, 4, 6, 7}, {4, 6, 7}]
