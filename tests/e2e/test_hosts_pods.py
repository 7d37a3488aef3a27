"""The same command over the pods of Kubernetes, stopped and continued; a pod that is started again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.launch.commands.audit import audit

from .clusters import pods
from .hosts import assert_gone, over, processes_of, titled, with_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_run_over_pods_is_stopped_and_continued_and_survives_a_pod_that_is_started_again(
    start_run: Any, ctrl_c: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_there: str
) -> None:
    """Pods are local processes: this test does not show how a real cluster behaves."""
    monkeypatch.setenv("ASYNCRL_HOST", "127.0.0.1")  # as in the launcher's pod
    monkeypatch.setenv("MY_API_KEY", "a secret of the launcher")
    hosts = with_python(over("kubernetes", "box2", "box3"), python_there)
    hosts["system__hosts"] = re.sub(r", address: [\d.]+|address: [\d.]+, ", "", hosts["system__hosts"])
    hosts |= {"system__kubernetes__image": "asyncrl", "system__kubernetes__namespace": "training"}
    hosts["system__kubernetes__claims"] = f"{{shared: '{tmp_path}'}}"
    first = start_run(total_train_steps=100_000, **hosts)
    with pods(first.run_dir, {"box3": "127.0.0.3"}):
        with pods(first.run_dir, {"box2": "127.0.0.2"}) as there:
            first.wait_for_step(2)
            (server,) = [process for process in processes_of(first) if "generation_server" in titled(process)]
            assert server.environ()["ASYNCRL_HOST"] == "127.0.0.2"
            assert server.environ()["MY_API_KEY"] == "a secret of the launcher"
            there["box2"].kill()
        with pods(first.run_dir, {"box2": "127.0.0.2"}):
            first.wait_for_line("generation_server/0 (on box2) was lost with the connection to its host")
            first.wait_for_line("generation_server/0 went on after")
            ctrl_c(first)
            assert first.wait() == 130, first.output + first.logs()
            assert_gone(first)

            goal = int(first.rows()[-1]["step"]) + 3
            second = start_run(total_train_steps=goal, **hosts)
            assert second.wait() == 0, second.output + second.logs()
    assert [row["step"] for row in second.rows()] == list(range(1, goal + 1))
    assert audit(second.run_dir).findings == ()
    assert_gone(second)
