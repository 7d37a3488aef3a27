from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.comm.names import gen_server_key, index_of, status_key, worker_key
from asyncrl.comm.shards import ModelShardID, RoutingError, RoutingTable, data_slot

ACTOR = [ModelShardID("actor", dp) for dp in range(2)]
REF = [ModelShardID("ref", dp) for dp in range(2)]
TABLE = RoutingTable({ACTOR[0]: 0, ACTOR[1]: 1, REF[0]: 0, REF[1]: 1}, data_workers=(0, 1))


@given(st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True), *[st.integers(0, 999)] * 3)
def test_parsing_a_shard_gives_back_what_was_written(role: str, dp: int, tp: int, pp: int) -> None:
    shard = ModelShardID(role, dp, tp, pp)
    assert ModelShardID.parse(str(shard)) == shard
    assert str(shard) == f"{role}@dp{dp}.tp{tp}.pp{pp}"


@pytest.mark.parametrize(
    "text", ["", "actor", "actor@dp0", "Actor@dp0.tp0.pp0", "actor@dp-1.tp0.pp0", "actor@dp0.tp0.pp0 "]
)
def test_a_text_that_is_no_shard_is_named(text: str) -> None:
    with pytest.raises(RoutingError, match="not valid"):
        ModelShardID.parse(text)


@pytest.mark.parametrize("fields", [("actor", -1), ("Actor", 0), ("", 0), ("a b", 0)])
def test_a_shard_that_cannot_be_written_is_refused(fields: tuple[str, int]) -> None:
    with pytest.raises(RoutingError, match="not valid"):
        ModelShardID(*fields)


def test_shards_and_data_slots_lead_to_workers() -> None:
    assert TABLE.worker_of(ACTOR[1]) == 1
    assert TABLE.worker_of("ref@dp0.tp0.pp0") == 0
    assert TABLE.worker_of(data_slot(1)) == 1


def test_one_worker_hosts_shards_of_several_roles() -> None:
    assert TABLE.hosted_by(0) == [ACTOR[0], REF[0]]
    assert TABLE.roles == ["actor", "ref"]


def test_the_heads_of_a_role_are_its_first_tensor_and_pipeline_shards() -> None:
    shards = {ModelShardID("actor", dp, tp): 2 * dp + tp for dp in range(3) for tp in range(2)}
    table = RoutingTable(shards)
    assert table.dp_heads("actor") == [0, 2, 4]
    assert table.shards_of("actor") == shards


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("actor@dp2.tp0.pp0", "'?actor@dp2.tp0.pp0'? is hosted by no worker.*actor, ref"),
        ("critic@dp0.tp0.pp0", "critic@dp0.tp0.pp0"),
        ("__data2__", "__data2__.*2 data slots"),
    ],
)
def test_a_name_that_leads_nowhere_is_named(name: str, message: str) -> None:
    with pytest.raises(RoutingError, match=message):
        TABLE.worker_of(name)


def test_a_role_that_nobody_hosts_is_named() -> None:
    with pytest.raises(RoutingError, match=r"'critic'.*actor, ref"):
        TABLE.dp_heads("critic")


def test_a_hole_in_a_roles_grid_is_named() -> None:
    with pytest.raises(RoutingError, match=r"actor@dp1\.tp0\.pp0"):
        RoutingTable({ModelShardID("actor", 0): 0, ModelShardID("actor", 2): 1})


def test_a_negative_worker_is_named() -> None:
    with pytest.raises(RoutingError, match=r"actor@dp0.*worker -1"):
        RoutingTable({ModelShardID("actor", 0): -1})
    with pytest.raises(RoutingError, match="__data0__"):
        RoutingTable({}, data_workers=(-3,))


def test_the_index_at_the_end_of_a_key_can_be_read_back() -> None:
    for key in (worker_key("actor", 7), status_key("rollout_worker", 7), gen_server_key(7)):
        assert index_of(key) == 7
    with pytest.raises(ValueError, match="'actor'"):
        index_of("workers/actor")
