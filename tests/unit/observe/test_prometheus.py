"""One endpoint gives Prometheus the metrics of runs and the figures of their processes; a board shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.observe.history import History
from asyncrl.observe.metrics import prometheus
from asyncrl.observe.metrics.glossary import glossary
from asyncrl.observe.metrics.prometheus import metric_name, prometheus_text

OBSERVED = glossary().figures
LAUNCHERS = Path(__file__).parents[3] / "launchers"
ROW = {
    "step": 3,
    "policy_version": 3,
    "reward/mean": 0.5,
    "ppo/loss_per_minibatch": [0.1, 0.2],
    "time/train_s": 2.0,
    "time/my_call_s": 0.25,
    "rollout/dropped_filter: zero_variance": 4,
    "rollout/dropped_failed": 1,
    'rollout/dropped_failed: reward my "own".py:score': 2,
    "restarts": 1,
    "mine/bent_spoons": 7.0,
}


def run(folder: Path, rows: list[dict[str, object]], lines: dict[str, list[dict[str, object]]]) -> History:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("eta: 1\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "observed").mkdir()
    for name, written in lines.items():
        (folder / "observed" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    return History(folder)


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "run"))
            assert labels not in found.setdefault(sample.name, {}), "each only once"
            found[sample.name][labels] = sample.value
    return found


def test_the_newest_row_and_the_newest_line_of_each_process_are_told(tmp_path: Path) -> None:
    early = ROW | {"step": 2, "reward/mean": 0.25, "eval/held_out/accuracy": 0.75, "rollout/dropped_timeout": 9}
    lines = {
        "model_worker-0": [
            {"at": 1.0, "cpu_s": 5.0, "rss": 10},
            {"at": 3.0, "cpu_s": 6.0, "rss": 20, "stage": "computes"},
        ],
        "rollout_worker-1": [{"at": 2.0, "rollouts": 4, "unheard_of": 1.0}],
        "rollout_worker-0": [{"at": 2.0, "rollouts": 9, "ended": True}],
    }
    found = samples(prometheus_text([run(tmp_path / "a" / "trial0", [early, ROW], lines)]))
    assert found["asyncrl_reward_mean"] == {(): 0.5}
    assert found["asyncrl_eval_accuracy"] == {(("set", "held_out"),): 0.75}, "the newest one that there is"
    assert "asyncrl_rollout_dropped_timeout" not in found, "it is of an older step"
    assert found["asyncrl_time_s"] == {(("call", "my_call"),): 0.25}
    assert found["asyncrl_rollout_dropped_filter"] == {(("reason", "zero_variance"),): 4}
    assert found["asyncrl_rollout_dropped_failed"] == {(): 1, (("code", 'reward my "own".py:score'),): 2}
    assert found["asyncrl_restarts_total"] == {(): 1}
    assert found["asyncrl_own"] == {(("name", "mine/bent_spoons"),): 7.0}
    worker = (("process", "model_worker/0"),)
    assert found["asyncrl_process_cpu_s_total"] == {worker: 6.0}
    assert found["asyncrl_process_rss"] == {worker: 20}
    assert found["asyncrl_process_rollouts"] == {(("process", "rollout_worker/1"),): 4}, "the other one has ended"
    assert found["asyncrl_process_written_at"][worker] == 3.0
    assert found["asyncrl_state"] == {(("state", "died"),): 1.0}


def test_each_metric_has_the_glossarys_text_once_whatever_the_number_of_runs(tmp_path: Path) -> None:
    runs = [run(tmp_path / "a" / f"trial{number}", [ROW], {}) for number in range(2)]
    text = prometheus_text(runs)
    helps = re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE)
    assert len({name for name, _ in helps}) == len(helps)
    assert ("asyncrl_reward_mean", "Mean reward of the batch's episodes, after shaping.") in helps
    assert ("asyncrl_time_train_s", dict(helps)["asyncrl_time_train_s"]) in helps
    assert dict(helps)["asyncrl_time_train_s"].endswith("Unit: s.")
    assert 'asyncrl_reward_mean{run="a/trial0"} 0.5' in text
    assert 'asyncrl_reward_mean{run="a/trial1"} 0.5' in text
    assert re.search(r"^# TYPE asyncrl_restarts_total counter$", text, re.MULTILINE)


def test_a_run_without_rows_and_lines_is_there(tmp_path: Path) -> None:
    assert samples(prometheus_text([run(tmp_path / "a" / "trial0", [], {})])) == {
        "asyncrl_state": {(("state", "died"),): 1.0}
    }


def test_no_two_metrics_get_the_same_name() -> None:
    names = [
        metric_name(entry)
        for entry in (*glossary().metrics, *OBSERVED)
        if entry.name != "rollout/dropped_failed: <code>"
    ]
    assert sorted(set(names)) == sorted(names)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)


def test_the_board_is_made_from_the_glossary() -> None:
    file = LAUNCHERS / "grafana_board.json"
    made = json.dumps(prometheus.board(), indent=1, ensure_ascii=False) + "\n"
    before = file.read_text() if file.exists() else ""
    if before != made:
        file.write_text(made)
    assert before == made, "launchers/grafana_board.json was out of date, and is written anew"


def test_the_board_is_whole_and_names_only_what_is_told() -> None:
    board = json.loads((LAUNCHERS / "grafana_board.json").read_text())
    reported = {metric_name(entry) for entry in (*glossary().metrics, *OBSERVED)}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
        for target in panel.get("targets", ()):
            (name,) = re.findall(r"asyncrl_\w+", target["expr"])
            assert name in reported


def test_a_panel_of_an_unknown_metric_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "BOARD", {"row": {"panel": ("reward/forgotten",)}})
    with pytest.raises(KeyError, match="reward/forgotten"):
        prometheus.board()


def test_the_example_scrapes_the_dashboard_with_its_token() -> None:
    (job,) = yaml.safe_load((LAUNCHERS / "prometheus.yml").read_text())["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8265"]}]
    assert job["authorization"] == {"credentials_file": "dashboard_token"}


def test_figures_that_go_up_and_down_are_gauges(tmp_path: Path) -> None:
    line = {"at": 1.0, "cpu_s": 5.0, "late_s": 0.5, "clock_ahead_s": -3.25, "clock_within_s": 0.125}
    text = prometheus_text([run(tmp_path / "a", [ROW], {"staging_server-1": [line]})])
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    for name in ("late_s", "clock_ahead_s", "clock_within_s"):
        assert kinds[f"asyncrl_process_{name}"] == "gauge"
        assert f"asyncrl_process_{name}_total" not in text
    assert kinds["asyncrl_process_cpu_s"] == "counter"


def test_every_total_of_a_process_is_a_counter() -> None:
    assert all(figure.grows for figure in OBSERVED if figure.name.endswith("_total"))
    counters = {figure.name for figure in OBSERVED if figure.grows and not figure.name.endswith("_total")}
    assert counters == {"cpu_s", "no_core_s", "computing_s", "busy_s", "idle_s"}
