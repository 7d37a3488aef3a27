"""Weight transports: one registry, no torch before the trainer's end is used, buckets within their limit."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.comm.http_client import JsonHttp
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.settings import ManagerConfig
from asyncrl.models.host_copies import in_pieces
from asyncrl.trainer.messages import SendWeights
from asyncrl.weights.transports import TRANSPORTS
from asyncrl.weights.transports.base import TrainerEnd, weight_transport
from asyncrl.weights.transports.distributed import ProcessGroupConnection
from asyncrl.weights.transports.from_memory import MemoryTrainerEnd

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_choice_of_the_setting_has_both_ends(name: str) -> None:
    transport = weight_transport(name)
    assert transport.name == name
    assert hasattr(transport.manager_end(None), "bring")
    assert isinstance(transport.trainer_end(ExperimentConfig(), None, CPU), TrainerEnd)


def test_the_default_needs_no_memory_and_any_engine() -> None:
    transport = weight_transport(ManagerConfig().weight_transport)
    assert transport.needs_folders
    assert list(transport.check(ExperimentConfig())) == []


async def test_where_servers_read_folders_the_trainer_holds_nothing_and_sends_nothing() -> None:
    end = weight_transport("disk").trainer_end(ExperimentConfig(), None, CPU)
    assert not isinstance(end, MemoryTrainerEnd)
    end.hold(1, [("w", torch.ones(1))])
    end.keep([1])
    with pytest.raises(RuntimeError, match=r"sends no weights; set manager\.weight_transport"):
        await end.send(SendWeights(0, "http://a", 1, False, 1.0))
    await end.close()


def test_the_managers_end_of_every_transport_comes_without_torch() -> None:
    code = """
import sys
import asyncrl.trainer.client, asyncrl.trainer.settings, asyncrl.trainer.parallel.placement
from asyncrl.weights.transports import TRANSPORTS
from asyncrl.weights.transports.base import weight_transport
for name in TRANSPORTS:
    weight_transport(name).manager_end(None)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def tensors(*sizes: int) -> list[tuple[str, Tensor]]:
    return [(f"t{index}", torch.zeros(size, dtype=torch.uint8)) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((), []),
        ((4, 4, 4), [["t0", "t1"], ["t2"]]),
        ((8, 1), [["t0"], ["t1"]]),
        ((1, 99, 1), [["t0"], ["t1"], ["t2"]]),
        ((3, 5), [["t0", "t1"]]),
    ],
)
def test_buckets_keep_the_order_and_stay_within_the_limit_where_a_tensor_does(
    sizes: tuple[int, ...], expected: list[list[str]]
) -> None:
    buckets = in_pieces(tensors(*sizes), lambda named: named[1].nbytes, limit=8)
    assert [[name for name, _ in bucket] for bucket in buckets] == expected


async def test_a_process_group_sends_a_bucket_as_one_tensor_that_a_server_can_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut as SGLang's `FlattenedTensorBucket` cuts it: in the order of the names, each tensor aligned to its type."""
    connection = ProcessGroupConnection(
        "http://a", JsonHttp(None), host="localhost", backend="gloo", timeout_s=1, group="g"
    )
    connection._group = object()  # type: ignore[assignment]
    sent: list[Tensor] = []
    asked: dict[str, Any] = {}

    async def call(path: str, body: dict[str, Any], **_: Any) -> None:
        asked.update(body, path=path)

    monkeypatch.setattr(connection, "_call", call)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src, group: sent.append(tensor.clone()))
    bucket = [
        ("flag", torch.tensor([True])),
        ("norm", torch.arange(3, dtype=torch.bfloat16)),
        ("bias", torch.arange(8.0).view(2, 4).T),
        ("scale", torch.tensor(2.5)),
    ]
    await connection._send_bucket(bucket, {"weight_version": "3"}, flush_cache=True)
    (flat,) = sent
    assert (asked["load_format"], asked["weight_version"]) == ("flattened_bucket", "3")
    offset, expected = 0, dict(bucket)
    for name, dtype, shape in zip(asked["names"], asked["dtypes"], asked["shapes"], strict=True):
        kind = getattr(torch, dtype)
        size = kind.itemsize * math.prod(shape)
        assert offset % kind.itemsize == 0
        assert torch.equal(flat[offset : offset + size].view(kind).view(shape), expected.pop(name))
        offset += size
    assert not expected
    assert offset == len(flat)
