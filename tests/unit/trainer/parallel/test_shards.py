from __future__ import annotations

import pytest

from asyncrl.trainer.parallel.shards import ModelShardID, RoutingError, RoutingTable


def test_one_worker_hosts_shards_of_several_roles_and_one_role_many_workers() -> None:
    shards = {ModelShardID("actor", dp, tp): 2 * dp + tp for dp in range(2) for tp in range(2)}
    table = RoutingTable({**shards, ModelShardID("ref", 0): 3}, data_workers=(0, 2))
    assert table.placement == {"actor": [0, 1, 2, 3], "ref": [3]}
    assert table.data_workers == (0, 2)


def test_a_hole_in_a_roles_grid_is_named() -> None:
    with pytest.raises(RoutingError, match=r"actor@dp1\.tp0\.pp0"):
        RoutingTable({ModelShardID("actor", 0): 0, ModelShardID("actor", 2): 1}, ())


def test_a_negative_worker_is_named() -> None:
    with pytest.raises(RoutingError, match=r"actor@dp0.*worker -1"):
        RoutingTable({ModelShardID("actor", 0): -1}, ())
    with pytest.raises(RoutingError, match="__data0__"):
        RoutingTable({}, data_workers=(-3,))
