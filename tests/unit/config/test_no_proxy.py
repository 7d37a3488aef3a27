"""What a run's processes send to each other goes through no proxy, whichever client an agent has."""

from __future__ import annotations

import socket
import urllib.request

import httpx
import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.machine import bypass_proxy
from asyncrl.runtime.settings import HostConfig

HOSTS = ["localhost", "127.0.0.1", "10.0.0.1", "10.0.0.2", "box3", socket.gethostname(), "agents.lan"]


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> ExperimentConfig:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    made = ExperimentConfig()
    made.system.host = "10.0.0.1"
    made.rollout.endpoint.advertise = "agents.lan"
    made.system.hosts = [HostConfig(), HostConfig(name="box2", address="10.0.0.2"), HostConfig(name="box3")]
    return made


def goes_through_a_proxy(url: str) -> list[bool]:
    """As urllib, which aiohttp and requests ask too, and httpx, which openai has, take it from the environment."""
    client = httpx.Client()
    return [
        not urllib.request.proxy_bypass(httpx.URL(url).netloc.decode()),
        client._transport_for_url(httpx.URL(url)) is not client._transport,
    ]


def test_every_address_of_the_run_is_reached_directly_and_others_through_the_proxy(config: ExperimentConfig) -> None:
    bypass_proxy(config)
    for host in [*HOSTS, "[::1]"]:
        through_urllib, through_httpx = goes_through_a_proxy(f"http://{host}:8000/v1")
        assert not through_httpx, host
        assert not through_urllib or host == "[::1]", host
    assert goes_through_a_proxy("https://api.example.com/v1") == [True, True]


def test_what_the_user_named_stays(config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "judge.corp, .lab")
    monkeypatch.setenv("NO_PROXY", "other.corp")
    bypass_proxy(config)
    for host in (*HOSTS, "judge.corp", "x.lab", "other.corp"):
        assert goes_through_a_proxy(f"https://{host}/v1") == [False, False], host
    monkeypatch.setenv("no_proxy", "*")
    bypass_proxy(config)
    assert goes_through_a_proxy("https://api.example.com/v1") == [False, False]
