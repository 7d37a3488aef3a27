from __future__ import annotations

import pytest

from asyncrl.comm.names import WorkerStatus, gen_server_key, index_of, status_key, worker_key


def test_the_index_at_the_end_of_a_key_can_be_read_back() -> None:
    for key in (worker_key("actor", 7), status_key("rollout_worker", 7), gen_server_key(7)):
        assert index_of(key) == 7
    with pytest.raises(ValueError, match="'actor'"):
        index_of("workers/actor")


def test_an_entry_comes_back_as_it_was_written_and_a_wrong_one_is_named() -> None:
    status = WorkerStatus("failed", 7, "out of memory")
    assert WorkerStatus.decode(status.encode()) == status
    with pytest.raises(ValueError, match=r"no WorkerStatus: .*`\$.state`"):
        WorkerStatus.decode('{"state": "resting", "pid": 7}')
    with pytest.raises(ValueError, match="no WorkerStatus"):
        WorkerStatus.decode("nonsense")
