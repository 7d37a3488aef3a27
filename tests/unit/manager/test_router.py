"""Routing policies, and that every placement is released once whatever happens."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncrl.manager.messages import RouteRequest
from asyncrl.manager.router import POLICIES, Caller, Policy, PrefixAffine, Router, ServerView
from tests.examples import examples

DOCS = Path(__file__).parents[3] / "docs"
CALLER = Caller("w0")
CALLERS = [CALLER, Caller("w1", "10.0.0.0"), Caller("w2", "10.0.0.1")]


def router_of(policy: str, servers: int = 3, version: int = 0) -> Router:
    router = Router(policy, conversations=100)
    for index in range(servers):
        router.update(index, f"http://{index}", version, True)
    return router


def request_of(
    name: str, *, tokens: int = 0, n: int = 1, affinity: str = "", rollout: str | None = None
) -> RouteRequest:
    return RouteRequest(0, tokens, n, request_id=name, rollout_id=rollout, affinity=affinity)


def place(
    router: Router, name: str, *, n: int = 1, tokens: int = 10, affinity: str = "", rollout: str | None = None
) -> int:
    server = router.schedule(request_of(name, tokens=tokens, n=n, affinity=affinity, rollout=rollout), CALLER)
    assert server is not None
    return server.index


def test_round_robin_takes_each_server_in_turn() -> None:
    router = router_of("round_robin")
    assert [place(router, f"r{i}") for i in range(5)] == [0, 1, 2, 0, 1]


def test_round_robin_goes_on_when_a_server_leaves() -> None:
    router = router_of("round_robin")
    place(router, "a")
    router.remove(1)
    assert [place(router, name) for name in "bcd"] == [2, 0, 2]


def test_round_robin_goes_on_past_a_server_that_takes_no_requests() -> None:
    router = router_of("round_robin", servers=4)
    place(router, "a")
    router.update(1, "http://1", 0, False)
    assert [place(router, name) for name in "bcd"] == [2, 3, 0]
    router.update(1, "http://1", 0, True)
    assert [place(router, name) for name in "ef"] == [1, 2]


def test_round_robin_forgets_a_server_that_leaves_with_its_requests() -> None:
    router = router_of("round_robin")
    place(router, "a")
    router.remove(0)
    assert [place(router, name) for name in "bcd"] == [1, 2, 1]


def test_requests_stay_where_they_are_as_their_server_gets_a_new_version() -> None:
    router = router_of("round_robin", servers=1)
    place(router, "a")
    router.update(0, "http://0", 1, True)
    router.update(0, "http://0", 1, False)
    assert (router.placed, router.servers[0].sequences) == (1, 1)


def test_servers_are_listed_by_their_index() -> None:
    router = Router("least_requests", conversations=100)
    for index in (2, 0, 1):
        router.update(index, f"http://{index}", 0, True)
    assert [view.index for view in router.servers] == [0, 1, 2]
    assert len(router) == 3


@pytest.mark.parametrize(("policy", "heavy"), [("least_requests", {"n": 3}), ("least_tokens", {"tokens": 30})])
def test_after_any_number_of_changes_the_least_loaded_server_gets_a_request(policy: str, heavy: dict[str, int]) -> None:
    router, random = router_of(policy, servers=5), Random(0)
    for number in range(600):
        loads = [(view.sequences, view.tokens)[policy == "least_tokens"] for view in router.servers]
        assert loads[place(router, f"r{number}", **(heavy if random.random() < 0.5 else {}))] == min(loads)
        for gone in random.sample(range(number + 1), min(number, 8)):
            router.release(f"r{gone}")


def test_requests_without_a_conversation_are_bound_to_no_server() -> None:
    router = router_of("prefix_affine")
    assert [place(router, name) for name in "abcd"] == [0, 1, 2, 0]


def test_least_requests_counts_the_sequences_of_a_group() -> None:
    router = router_of("least_requests", servers=2)
    assert place(router, "a", n=8) == 0
    assert [place(router, name) for name in "bcd"] == [1, 1, 1]


def test_least_tokens_weighs_long_answers() -> None:
    router = router_of("least_tokens", servers=2)
    assert place(router, "a", tokens=1000) == 0
    assert [place(router, name, tokens=100) for name in "bcd"] == [1, 1, 1]


def test_a_conversation_stays_where_its_cache_is() -> None:
    router = router_of("prefix_affine")
    home = place(router, "a0", affinity="a")
    for other in range(6):
        place(router, f"other{other}", affinity=f"o{other}")
    assert place(router, "a1", affinity="a", tokens=9) == home


def test_a_conversation_moves_when_its_server_takes_no_requests_and_stays_there() -> None:
    router = router_of("prefix_affine", servers=2)
    assert place(router, "a0", affinity="a") == 0
    router.update(0, "http://0", 0, False)
    assert place(router, "a1", affinity="a") == 1
    router.update(0, "http://0", 0, True)
    assert place(router, "a2", affinity="a") == 1


def test_affinities_are_bounded() -> None:
    policy = PrefixAffine({view.index: view for view in router_of("prefix_affine").servers}, conversations=4)
    for view in policy._servers.values():
        policy.changed(view)
    for index in range(100):
        assert policy.choose(request_of(str(index), affinity=str(index)), CALLER, lambda view: True) is not None
    assert len(policy._home) == 4


def test_a_conversation_whose_server_is_beyond_its_share_leaves_it_for_one_request_only() -> None:
    router = router_of("prefix_affine", servers=2)
    assert place(router, "a0", affinity="a") == 0
    place(router, "other", n=8, tokens=0, affinity="a")
    router.returning = 1
    assert place(router, "a1", affinity="a") == 1
    router.returning = 0
    assert place(router, "a2", affinity="a") == 0


def test_a_conversation_whose_server_is_too_old_for_a_request_leaves_it_for_this_one_only() -> None:
    router = router_of("prefix_affine", servers=2)
    assert place(router, "a0", affinity="a") == 0
    router.update(1, "http://1", 1, True)
    newer = router.schedule(request_of("a1", affinity="a"), CALLER, min_version=1)
    assert newer is not None
    assert newer.index == 1
    assert place(router, "a2", affinity="a") == 0


def test_only_servers_at_the_wanted_version_get_a_request() -> None:
    router = router_of("least_requests", servers=2, version=3)
    router.update(1, "http://1", 4, True)
    server = router.schedule(request_of("a"), CALLER, min_version=4)
    assert server is not None
    assert (server.index, server.version) == (1, 4)
    assert router.schedule(request_of("b"), CALLER, min_version=5) is None


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_server_that_is_too_old_for_one_request_gets_the_next_one(policy: str) -> None:
    router = router_of(policy, servers=2, version=3)
    router.update(1, "http://1", 4, True)
    for name, min_version, index in (("a", 4, 1), ("b", 0, 0)):
        server = router.schedule(request_of(name, tokens=9), CALLER, min_version=min_version)
        assert server is not None
        assert server.index == index


def test_nothing_is_placed_while_no_server_takes_requests() -> None:
    router = Router("least_requests", conversations=100)
    assert router.schedule(request_of("a"), CALLER) is None
    assert router.placed == 0


def test_scheduling_again_moves_the_request() -> None:
    router = router_of("least_requests", servers=2)
    place(router, "a", n=4)
    router.update(0, "http://0", 0, False)
    assert place(router, "a", n=2) == 1
    assert [view.sequences for view in router.servers] == [0, 2]


def test_a_request_that_has_moved_outlives_the_server_that_it_left() -> None:
    router = router_of("least_requests", servers=2)
    assert place(router, "a") == 0
    router.update(0, "http://0", 0, False)
    assert place(router, "a") == 1
    router.remove(0)
    assert (router.placed, router.servers[0].sequences) == (1, 1)


def test_a_request_that_cannot_move_leaves_its_old_place() -> None:
    router = router_of("least_requests", servers=1)
    place(router, "a")
    router.update(0, "http://0", 0, False)
    assert router.schedule(request_of("a"), CALLER) is None
    assert router.servers[0].sequences == 0


def test_the_end_of_a_rollout_releases_all_its_requests() -> None:
    router = router_of("least_requests")
    place(router, "a", rollout="r")
    place(router, "b", rollout="r")
    place(router, "c", rollout="other")
    router.release_rollout("r")
    assert router.placed == 1


def test_the_page_says_when_to_use_each_policy() -> None:
    section = (DOCS / "sizing.md").read_text().partition(": `manager.routing`\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", section, re.M) == list(POLICIES)


class CountedServers(dict[int, ServerView]):
    """Counts the servers that are looked at."""

    looks = 0

    def get(self, index: int, default: ServerView | None = None) -> ServerView | None:  # type: ignore[override]
        self.looks += 1
        return super().get(index, default)

    def __getitem__(self, index: int) -> ServerView:
        self.looks += 1
        return super().__getitem__(index)

    def values(self) -> Any:
        self.looks += len(self)
        return super().values()


def router_of_many(policy: str) -> tuple[Router, CountedServers]:
    router = Router(policy, conversations=100)
    router._servers = servers = CountedServers()
    router._policy = POLICIES[policy](servers, 100)
    for index in range(512):
        router.update(index, f"http://{index}", 0, True)
    servers.looks = 0
    return router, servers


def entries(part: Any, servers: CountedServers) -> int:
    """Number of entries in all containers of a policy, besides the `servers`."""
    if part is servers:
        return 0
    own = list(part.values() if isinstance(part, dict) else part) if isinstance(part, dict | list | deque) else []
    return len(own) + sum(entries(each, servers) for each in (*own, *getattr(part, "__dict__", {}).values()))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_choice_looks_at_few_servers_of_many(policy: str) -> None:
    """Also after many placements and releases, which leave nothing behind: a policy has some entries for each server,
    and none for a request that is over.
    """
    router, servers = router_of_many(policy)
    for number in range(2_048):
        place(router, f"r{number}", n=1 + number % 5)
        if number >= 1_024:
            router.release(f"r{number - 1_024}")
    assert 0 < servers.looks < 5 * 2_048
    for _ in range(4_096):
        place(router, "again")
        router.release("again")
    assert 512 <= entries(router._policy, servers) <= 8 * 512


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_requests_that_wait_for_returning_servers_look_at_few_servers_of_many(policy: str) -> None:
    router, servers = router_of_many(policy)
    router.returning = 4_096
    placed = [router.schedule(request_of(f"r{number}", tokens=9), CALLER) for number in range(4_096)]
    assert 512 <= sum(server is not None for server in placed) < 1_024
    assert 0 < servers.looks < 5 * 4_096


def test_a_restarted_server_starts_empty() -> None:
    router = router_of("least_requests", servers=1)
    place(router, "a")
    router.update(0, "http://elsewhere", 0, True)
    router.release("a")
    assert router.servers[0].sequences == 0


class _OnCallersHost(Policy):
    """A server on the caller's host; none if there is none."""

    def choose(
        self, request: RouteRequest, caller: Caller, may_have: Callable[[ServerView], bool]
    ) -> ServerView | None:
        near = (view for view in self._servers.values() if view.host == caller.host and may_have(view))
        return next(near, None)


Allowed = Callable[[Sequence[ServerView], Caller], Collection[ServerView]]
"""(servers that may have a request, its caller) to those of them that a policy may choose."""


def any_of_them(servers: Sequence[ServerView], caller: Caller) -> Collection[ServerView]:
    return servers


def least(*load: str) -> Allowed:
    """The first of the servers with the least load, by these attributes in order."""
    return lambda servers, caller: sorted(servers, key=lambda view: [getattr(view, name) for name in load])[:1]


ALLOWED: dict[str, Allowed] = {
    "round_robin": any_of_them,
    "least_requests": least("sequences", "tokens", "index"),
    "least_tokens": least("tokens", "sequences", "index"),
    "prefix_affine": any_of_them,
    "stub": lambda servers, caller: [view for view in servers if view.host == caller.host],
}
"""By policy. If there are none, the request waits."""


class AnyOrder(RuleBasedStateMachine):
    """Requests, workers and servers come and go in any order; messages repeat."""

    @initialize(policy=st.sampled_from([*sorted(POLICIES), "stub"]))
    def begin(self, policy: str) -> None:
        with patch.dict(POLICIES, stub=_OnCallersHost):
            self.allowed, self.router = ALLOWED[policy], Router(policy, conversations=100)

    @rule(server=st.integers(0, 3), generation=st.integers(0, 1), version=st.integers(0, 2), routable=st.booleans())
    def update(self, server: int, generation: int, version: int, routable: bool) -> None:
        url, placed = f"http://10.0.0.{server % 2}:800{server}/{generation}", self.router.placed
        same = any(view.url == url for view in self.router.servers)
        self.router.update(server, url, version, routable)
        assert self.router.placed == placed or not same

    @rule(server=st.integers(0, 3))
    def remove(self, server: int) -> None:
        stay = {key for key, placement in self.router._placements.items() if placement.server != server}
        self.router.remove(server)
        assert self.router._placements.keys() == stay

    @rule(returning=st.integers(0, 3))
    def some_return(self, returning: int) -> None:
        self.router.returning = returning

    @rule(
        request=st.integers(0, 8),
        caller=st.sampled_from(CALLERS),
        rollout=st.sampled_from([None, "r0", "r1"]),
        n=st.integers(1, 8),
        tokens=st.integers(0, 100),
        version=st.integers(0, 2),
    )
    def schedule(self, request: int, caller: Caller, rollout: str | None, n: int, tokens: int, version: int) -> None:
        wanted = request_of(str(request), tokens=tokens, n=n, affinity=str(request % 3), rollout=rollout)
        self.router.release(str(request))
        returning, in_service = self.router.returning, sum(view.routable for view in self.router.servers)
        placed = sum(placement.request.n for placement in self.router._placements.values())
        share = 1.25 * (placed + n) / (in_service + returning) if returning else float("inf")
        may_have = [
            view
            for view in self.router.servers
            if view.routable and view.version >= version and view.sequences <= share
        ]
        allowed = {view.index for view in self.allowed(may_have, caller)}
        server = self.router.schedule(wanted, caller, version)
        assert server.index in allowed if server is not None else not allowed

    @rule(request=st.integers(0, 8))
    def release(self, request: int) -> None:
        self.router.release(str(request))

    @rule(rollout=st.sampled_from(["r0", "r1"]))
    def finish_rollout(self, rollout: str) -> None:
        self.router.release_rollout(rollout)

    @rule(worker=st.sampled_from([caller.worker for caller in CALLERS]))
    def worker_dies(self, worker: str) -> None:
        self.router.release_worker(worker)
        assert all(placement.worker != worker for placement in self.router._placements.values())

    @invariant()
    def counts_are_those_of_the_placements(self) -> None:
        placements = self.router._placements.values()
        for view in self.router.servers:
            here = [placement.request for placement in placements if placement.server == view.index]
            assert view.sequences == sum(request.n for request in here)
            assert view.tokens == sum(request.tokens for request in here)
        known = {view.index for view in self.router.servers}
        assert all(placement.server in known for placement in placements)

    def teardown(self) -> None:
        for caller in CALLERS:
            self.router.release_worker(caller.worker)
        assert self.router.placed == 0
        assert not self.router._of_rollout
        assert not self.router._of_worker
        assert not self.router._of_server


AnyOrder.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40)
test_counts_never_leak = AnyOrder.TestCase


def test_a_policy_of_ones_own_sees_the_callers_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "stub", _OnCallersHost)
    router = Router("stub", conversations=10)
    router.update(0, "http://10.0.0.1:8000", 0, True)
    router.update(1, "http://10.0.0.2:8000", 0, True)
    here = router.schedule(request_of("a"), Caller("rollout_worker/3", "10.0.0.2"))
    assert here is not None
    assert here.index == 1
    assert router.schedule(request_of("b"), Caller("rollout_worker/4", "10.0.0.3")) is None
