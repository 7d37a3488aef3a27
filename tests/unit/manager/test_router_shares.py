"""While servers return from an update, the first ones back are not given what belongs to all."""

import pytest

from asyncrl.manager.messages import RouteRequest
from asyncrl.manager.router import POLICIES, Caller, Router

CALLER = Caller("w/0")


def _request(number: int, n: int = 8) -> RouteRequest:
    return RouteRequest(10, 100, n, request_id=f"r{number}", rollout_id=f"r{number}", affinity=f"c{number}")


def _fleet(policy: str, servers: int) -> Router:
    router = Router(policy, 1_000)
    for index in range(servers):
        router.update(index, f"http://server{index}", 0, True)
    return router


def _all_leave(router: Router) -> None:
    for view in router.servers:
        router.update(view.index, view.url, 0, False)
    router.returning = len(router)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("placed_before", [True, False])
def test_no_server_back_from_an_update_gets_more_than_its_share(policy: str, placed_before: bool) -> None:
    servers, requests = 8, [_request(number) for number in range(64)]
    router = _fleet(policy, servers)
    if placed_before:
        assert all(router.schedule(request, CALLER) for request in requests)
    _all_leave(router)
    waiting = list(requests)
    for index in range(servers):
        router.update(index, f"http://server{index}", 1, True)
        router.returning -= 1
        waiting = [request for request in waiting if router.schedule(request, CALLER, 1) is None]
    assert not waiting
    loads = [view.sequences for view in router.servers]
    assert max(loads) <= 1.25 * sum(loads) / servers + 8


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_one_request_finds_a_server_that_has_none_whoever_returns(policy: str) -> None:
    router = _fleet(policy, 4)
    _all_leave(router)
    router.update(2, "http://server2", 1, True)
    router.returning = 3
    placed = router.schedule(_request(0), CALLER, 1)
    assert placed is not None
    assert placed.index == 2


@pytest.mark.parametrize(("n", "placed"), [(3, True), (2, False)])
def test_a_server_with_exactly_its_share_gets_one_more_request(n: int, placed: bool) -> None:
    """It has 5 sequences; with 3 more the mean of two servers is 4, and its share 5."""
    router = _fleet("least_requests", 1)
    assert router.schedule(_request(0, n=5), CALLER)
    router.returning = 1
    assert (router.schedule(_request(1, n=n), CALLER) is not None) is placed


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_request_that_waits_is_placed_when_another_one_ends_or_a_server_is_back(policy: str) -> None:
    router = _fleet(policy, 1)
    router.returning = 1
    placed = [router.schedule(_request(number), CALLER) is not None for number in range(4)]
    assert placed == [True, True, False, False]
    router.release("r0")
    placed = [router.schedule(_request(number), CALLER) is not None for number in (2, 3)]
    assert placed == [True, False]
    router.update(1, "http://server1", 0, True)
    back = router.schedule(_request(3), CALLER)
    assert back is not None
    assert back.index == 1


def test_a_server_that_is_late_does_not_hold_up_those_that_serve() -> None:
    router = _fleet("least_requests", 16)
    router.update(0, "http://server0", 0, False)
    router.returning = 1
    placed = [router.schedule(_request(number), CALLER) for number in range(320)]
    assert all(placed)


def test_who_leaves_for_good_is_waited_for_by_nobody() -> None:
    router = _fleet("least_requests", 8)
    for index in range(1, 8):
        router.remove(index)
    assert all(router.schedule(_request(number), CALLER) for number in range(32))


@pytest.mark.parametrize("how", ["removed", "leave", "leave and come back"])
def test_who_has_left_takes_no_share_of_the_load(how: str) -> None:
    """Of four, a server that returns and the one that serves get half each."""
    router = _fleet("least_requests", 4)
    for index in range(1, 4):
        if how == "removed":
            router.remove(index)
        else:
            router.update(index, f"http://server{index}", 0, False)
    if how == "leave and come back":
        for index, there in ((1, True), (1, False)):
            router.update(index, f"http://server{index}", 0, there)
    router.returning = 1
    placed = [router.schedule(_request(number), CALLER) is not None for number in range(4)]
    assert placed == [True, True, False, False]
