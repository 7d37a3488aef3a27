"""An address that the endpoint cannot listen on is refused by its setting's name, before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.rollout.checks import check

FOLDER = Path(__file__).parents[3] / "experiments"


@pytest.fixture(scope="module")
def config() -> ExperimentConfig:
    loaded = load_experiment("async_ppo", [], FOLDER)
    assert isinstance(loaded, ExperimentConfig)
    return loaded


def problems(config: ExperimentConfig, host: str = "127.0.0.1", port: int = 0, advertise: str = "") -> list[str]:
    endpoint = config.rollout.endpoint
    endpoint.host, endpoint.port, endpoint.advertise = host, port, advertise
    return list(check(config))


def test_a_port_that_another_program_has_is_named(config: ExperimentConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (problem,) = problems(config, port=port)
        assert problem.startswith(f"rollout.endpoint.port={port}: cannot be listened on (Address already in use)")
        assert problems(config) == []
    assert problems(config, port=port) == []


def test_a_port_of_an_earlier_run_is_free(config: ExperimentConfig) -> None:
    """The kernel keeps its connections in TIME_WAIT, which hinders no server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()
            client.recv(1)
    assert problems(config, port=port) == []


def test_an_empty_host_is_not_one_address(config: ExperimentConfig) -> None:
    (problem,) = problems(config, host="", advertise="box")
    assert problem.startswith("rollout.endpoint.host='': ")
    assert problems(config, host="0.0.0.0", advertise="box") == []
