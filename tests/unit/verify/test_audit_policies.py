"""The audit of a run with two trained policies: each sample trained the policy that generated it, and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.launch.commands.audit import audit
from tests.unit.verify.conftest import Launch, begin_run
from tests.unit.verify.test_audit import ledger_of, write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three steps whose rollouts have a sample of the run's own policy and one of `judge`."""
    folder = tmp_path / "run"
    begin_run(folder)
    launch = Launch(folder, judge=True)
    for _ in range(3):
        launch.step()
    launch.end()
    assert audit(folder).findings == ()
    return folder


def trained(run: Path, **policies: dict[str, int]) -> str:
    """Change the shares of the first trained rollout; return what the audit finds."""
    file, lines = ledger_of(run)
    number = next(number for number, line in enumerate(lines) if line["kind"] == "trained")
    for name, share in policies.items():
        lines[number]["policies"][name] |= share
    write(file, lines, sealed=True)
    return str(audit(run).findings)


def test_a_policy_trained_on_tokens_of_another_is_found(run: Path) -> None:
    found = trained(run, actor={"trained": 0, "samples": 0}, judge={"trained": 5, "samples": 2})
    assert "trains policy 'judge' on 5 tokens, and it generated 4 in it: samples of another policy" in found


def test_shares_that_do_not_add_up_to_the_rollout_are_found(run: Path) -> None:
    assert "has 5 tokens in 2 samples, and its policies 4 in 2" in trained(run, actor={"trained": 2})


def test_ranks_that_trained_a_policy_on_other_tokens_are_found(run: Path) -> None:
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[1]["policy/judge/tokens/trained"] += 3
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "step 2 trained policy 'judge' on 11 tokens, the ledger has 8" in str(audit(run).findings)


@pytest.mark.parametrize("alone", [False, True], ids=["all files", "one file of two"])
def test_a_kept_sample_that_trained_another_policy_than_its_own_is_found(run: Path, alone: bool) -> None:
    pytest.importorskip("pyarrow")
    own, judge = (run / "samples" / f"step-00000002.{writer}.parquet" for writer in ("head-0", "head-0-judge"))
    if alone:  # the oldest files are removed
        own.unlink()
    assert audit(run).findings == ()
    change(judge, lambda rows: rows[0].update(group="solver"))
    found = str(audit(run).findings)
    assert "samples of the comparison group 'solver', and policy 'judge' was trained on them" in found


def test_steps_whose_kept_samples_are_all_gone_are_noted(run: Path) -> None:
    pytest.importorskip("pyarrow")
    assert audit(run).notes == ()
    for file in [*(run / "samples").glob("step-00000001.*"), *(run / "samples").glob("step-00000003.*")]:
        file.unlink()
    found = audit(run)
    assert found.findings == ()
    assert [note.partition(", as ")[0] for note in found.notes] == [
        "samples: has no file of 2 steps whose samples samples.every=1 keeps"
    ]


def test_a_policy_whose_kept_samples_of_a_rollout_are_gone_is_found(run: Path) -> None:
    pytest.importorskip("pyarrow")
    change(run / "samples" / "step-00000002.head-0-judge.parquet", lambda rows: rows.pop())
    assert "has 0 tokens in 0 samples, the ledger 2 in 1" in str(audit(run).findings)


def change(file: Path, forge: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(file)
    rows = table.to_pylist()
    forge(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), file)
