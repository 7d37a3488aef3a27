"""The audit of a run's files: green on what a run leaves, red on whatever is changed in it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.comm.ended_rollouts import (
    Admitted,
    Begin,
    Finished,
    Line,
    RolloutCounts,
    RunSettings,
    Step,
    Trained,
)
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.launch.commands.audit import audit, main
from asyncrl.verify.audit.ledger_files import Entry, read_ledger
from asyncrl.verify.audit.ledger_files import surviving as surviving_entries
from asyncrl.verify.audit.ledger_rules import Replay
from tests.unit.verify.conftest import BATCH, ROWS, SEED, WORKERS, Launch, begin_run

Lines = list[dict[str, Any]]


def ledger_of(run: Path) -> tuple[Path, Lines]:
    file = run / "ledger" / "000001.jsonl"
    return file, [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, lines: Lines, *, sealed: bool) -> None:
    """Write `lines`, with seals that fit where `sealed`: what somebody can do who knows the format."""
    data, unsealed = b"", hashlib.sha256()
    for number, line in enumerate(lines, 1):
        if "seal" not in line:
            raw = json.dumps(line, separators=(",", ":")).encode() + b"\n"
            unsealed.update(raw)
            data += raw
            continue
        if sealed:
            line = line | {"line": number}
        raw = json.dumps({key: value for key, value in line.items() if key != "seal"}, separators=(",", ":")).encode()
        raw = raw[:-1] + b',"seal":"'
        unsealed.update(raw)
        seal = unsealed.hexdigest() if sealed else line["seal"]
        data += raw + seal.encode() + b'"}\n'
        unsealed = hashlib.sha256(seal.encode())
    file.write_bytes(data)


def changed(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value - 1000.0
        case str():
            return value[:-1] + ("0" if value[-1:] != "0" else "1")
        case dict() if value and all(key.lstrip("-").isdigit() for key in value):
            return {str(int(key) + 1): count for key, count in value.items()}
        case dict():
            return value | {"zero_variance": value.get("zero_variance", 0) + 1}
    raise AssertionError(value)


def paths(line: dict[str, Any]) -> list[tuple[str, ...]]:
    """The fields of a line, those of its parts too."""
    found: list[tuple[str, ...]] = []
    for key, value in line.items():
        if key in ("books", "settings") and value is not None:
            found += [(key, inner) for inner in value]
        elif value is not None and key != "seal":
            found.append((key,))
    return found


def doctor(lines: Lines, number: int, path: tuple[str, ...]) -> None:
    target = lines[number]
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = changed(target[path[-1]])


def surviving(lines: Lines) -> list[int]:
    """The places in `lines` of those that no later lineage ruled out."""
    kept: list[int] = []
    for number, line in enumerate(lines):
        if line["kind"] == "begin":
            kept = [each for each in kept if each < line["after"]]
        kept.append(number)
    return kept


def test_what_a_run_leaves_is_found_in_order(recorded_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(recorded_run).findings == ()
    assert main([str(recorded_run)], "asyncrl") == 0
    summary = capsys.readouterr().out
    assert summary == (
        "nothing found: 3 lineages, 5 steps, 20 rollouts trained, "
        "dropped: 1 invalid_prompt, 1 worker_died, 1 zero_variance, abandoned: 4 (rollouts lost between lineages: 5)\n"
    )


def test_whoever_changes_any_field_breaks_a_seal(recorded_run: Path) -> None:
    file, lines = ledger_of(recorded_run)
    fields = {(line["kind"], path): number for number, line in enumerate(lines) for path in paths(line)}
    assert {kind for kind, _ in fields} == {
        "begin", "admitted", "finished", "dropped", "abandoned", "trained", "step", "end",
    }  # fmt: skip
    for (kind, path), number in fields.items():
        doctored = json.loads(json.dumps(lines))
        doctor(doctored, number, path)
        write(file, doctored, sealed=False)
        assert audit(recorded_run).findings, (kind, path)


def test_whoever_seals_anew_is_found_by_the_rules(recorded_run: Path) -> None:
    file, lines = ledger_of(recorded_run)
    kept = surviving(lines)
    fields: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for number in kept:
        for path in paths(lines[number]):
            if path not in (("kind",), ("line",)):
                fields.setdefault((lines[number]["kind"], path), []).append(number)
    noticed = set()
    for (kind, path), numbers in fields.items():
        for number in numbers[:: max(1, len(numbers) // 4)]:
            doctored = json.loads(json.dumps(lines))
            doctor(doctored, number, path)
            write(file, doctored, sealed=True)
            if (found := audit(recorded_run)).findings:
                noticed.add((kind, path))
            elif path == ("at",):
                assert found.notes or number < 2, "nothing comes before the first time of a process"
    # A clock that is set back just before the end is a note, and any worker may play any prompt.
    assert fields.keys() - noticed == {("end", ("at",)), ("admitted", ("worker",))}


@pytest.mark.parametrize("kind", ["admitted", "finished", "dropped", "abandoned", "trained", "step"])
def test_a_line_that_was_taken_away_or_repeated_is_found(recorded_run: Path, kind: str) -> None:
    file, lines = ledger_of(recorded_run)
    number = next(each for each in surviving(lines) if lines[each]["kind"] == kind)
    taken, repeated = lines[:number] + lines[number + 1 :], lines[: number + 1] + lines[number:]
    for doctored in (taken, repeated):
        later = json.loads(json.dumps(doctored))
        shift = len(doctored) - len(lines)
        for line in later:
            if line["kind"] == "begin" and line["after"]:
                line["after"] += shift
        write(file, later, sealed=False)
        assert audit(recorded_run).findings, "the seal"
        write(file, later, sealed=True)
        assert audit(recorded_run).findings, "the rules, or the checkpoint's own line"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda row: row.update(step=row["step"] + 1), "is of policy version"),
        (lambda row: row.update({"reward/mean": 0.9}), "has reward/mean 0.9"),
        (lambda row: row.update({"rollout/len_mean": 9.0}), "has rollout/len_mean 9.0"),
        (lambda row: row.update({"staleness/max": 0.25}), "has staleness/max 0.25"),
        (lambda row: row.update({"tokens/batch": 1.0}), "has tokens/batch 1.0"),
    ],
)
def test_metrics_that_are_not_the_ledgers_are_found(
    recorded_run: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    file = recorded_run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    change(rows[2])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [says in finding for finding in audit(recorded_run).findings].count(True) == 1


@pytest.mark.parametrize(("step", "found"), [(1, False), (2, True), (3, True), (4, True), (5, True)])
def test_a_wrong_count_of_failed_rollouts_is_found_but_in_the_first_row(
    recorded_run: Path, step: int, found: bool
) -> None:
    """Whatever was restarted before; steps 3 and 5 are the first of their lineages."""
    file = recorded_run / "metrics.jsonl"
    rows = [json.loads(line) | {"restarts": 2} for line in file.read_text().splitlines()]
    rows[step - 1]["rollout/dropped_invalid_prompt"] += 1
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    says = f"metrics.jsonl:{step}: step {step} has rollout/dropped_invalid_prompt "
    assert [finding.startswith(says) for finding in audit(recorded_run).findings] == [True] * found


def test_a_missing_row_of_metrics_is_found(recorded_run: Path) -> None:
    file = recorded_run / "metrics.jsonl"
    rows = file.read_text().splitlines(keepends=True)
    for left, says in ((rows[:1] + rows[2:], "comes after that of 1"), (rows[:-1], "ends with step 4")):
        file.write_text("".join(left))
        assert any(says in finding for finding in audit(recorded_run).findings)


def test_a_row_that_waits_for_its_evaluation_is_in_the_checkpoint_that_a_stop_leaves(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    launch = Launch(run)
    launch.step()
    launch.step(evaluated=False)
    launch.save()
    launch.end(total_steps=9)
    assert audit(run).findings == ()
    summary, reported = run / "summary.json", json.loads((run / "summary.json").read_text())
    summary.write_text(json.dumps(reported | {"total_steps": 2}))
    findings = audit(run).findings
    assert "metrics.jsonl: ends with step 1; the run ended at 2" in findings, "complete, it wrote all"
    summary.write_text(json.dumps(reported))
    file = run / "metrics.jsonl"
    with file.open("a") as rows:  # its evaluation was given up at the end, when the checkpoint was there
        rows.write(json.dumps({"step": 2} | launch.rows[0]["row"]) + "\n")
    assert audit(run).findings == ()
    file.write_text("")
    assert audit(run).findings == (
        "checkpoints/v2: the row of step 2 comes after nothing",
        "summary.json: has an evaluation of version 1, and metrics.jsonl has none",
    )


@pytest.mark.parametrize(("prompts", "found"), [(11, False), (12, False), (13, True)])
def test_a_run_may_end_early_only_once_too_few_prompts_of_its_epochs_are_left(
    prompts: int, found: bool, tmp_path: Path
) -> None:
    run = begin_run(tmp_path / "run")
    launch = Launch(run)
    launch.step()
    launch.step()
    launch.end()
    used = 9  # one was given up
    config = run / "config.yaml"
    epochs = (prompts + 0.5) / ROWS
    config.write_text(
        config.read_text().replace("total_train_steps: 2", f"total_train_steps: 3\ntotal_epochs: {epochs}")
    )
    assert (prompts - used >= BATCH) == found
    assert bool(audit(run).findings) == found


def test_a_held_row_that_is_not_the_ledgers_is_found(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    launch = Launch(run)
    launch.step(evaluated=False)
    launch.rows[0]["row"]["reward/mean"] = 0.9
    launch.save()
    launch.end(total_steps=9)
    (run / "metrics.jsonl").touch()
    (finding,) = audit(run).findings
    assert finding.startswith("checkpoints/v1: step 1 has reward/mean 0.9")


@pytest.mark.parametrize("name", ["weights/actor/v5/model.safetensors", "checkpoints/v2/state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_weights_and_checkpoints_are_found(recorded_run: Path, name: str, damage: str) -> None:
    file = recorded_run / name
    data = bytearray(file.read_bytes())
    data[10] ^= 1
    match damage:
        case "flip":
            file.write_bytes(data)
        case "cut":
            file.write_bytes(data[:-1])
        case "remove":
            file.unlink()
    (finding,) = audit(recorded_run).findings
    assert finding.startswith(f"{name.rpartition('/')[0]}: {file.name} ")


def test_weights_that_no_step_made_are_found(recorded_run: Path) -> None:
    shutil.copytree(recorded_run / "weights/actor/v5", recorded_run / "weights/actor/v9")
    findings = audit(recorded_run).findings
    assert findings == (
        "weights/actor/v9: its manifest is of version 5",
        "weights/actor/v9: no step made it; the last was 5",
    )


def test_settings_and_summary_that_are_not_the_ledgers_are_found(recorded_run: Path) -> None:
    config, summary = recorded_run / "config.yaml", recorded_run / "summary.json"
    config.write_text(config.read_text().replace("max_head_offpolicyness: 1", "max_head_offpolicyness: 2"))
    reported = json.loads(summary.read_text())
    reported["books"]["trained"] -= 1
    summary.write_text(json.dumps(reported))
    assert audit(recorded_run).findings == (
        "config.yaml: max_head_offpolicyness is 2, the ledger's last launch had 1",
        "summary.json: has trained 19, the ledger 20",
    )


@pytest.mark.parametrize("figure", ["failed", "cut_short"])
def test_an_evaluation_without_a_result_is_in_the_row_and_in_the_summary(recorded_run: Path, figure: str) -> None:
    summary, metrics = recorded_run / "summary.json", recorded_run / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[-1][f"eval/other/{figure}"] = 1.0
    metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert any(f"has eval/other/{figure}, " in finding for finding in audit(recorded_run).findings)
    reported = {"evaluations_failed": [{"version": rows[-1]["step"], "set": "other", "reason": "any"}]}
    summary.write_text(json.dumps(json.loads(summary.read_text()) | reported))
    assert audit(recorded_run).findings == ()


def test_a_torn_last_line_is_no_finding_and_the_next_launch_repairs_it(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    first = Launch(run)
    first.step()
    state = first.save()
    first.ledger.close()
    file = run / "ledger" / "000001.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"kind":"admitted","rollout":"r0-9')
    torn = audit(run)
    assert torn.findings == ()
    location = f"ledger/000001.jsonl:{len(whole.splitlines()) + 1}"
    assert torn.notes == (f"{location}: the last line is torn after 34 bytes; the next launch removes it",)
    second = Launch(run, state)
    assert second.ledger.lineage == 1
    second.step()
    second.save()
    second.end()
    assert file.read_bytes().startswith(whole + b'{"kind":"begin"')
    assert audit(run).findings == ()


def test_files_follow_each_other_and_a_missing_one_is_found(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    launch = Launch(run, file_bytes=2000)
    for _ in range(4):
        launch.step()
    launch.end()
    files = sorted((run / "ledger").iterdir())
    assert len(files) > 2
    assert audit(run).findings == ()
    files[1].unlink()
    assert any("000002.jsonl was expected" in finding for finding in audit(run).findings)


def test_a_launch_without_the_ledger_of_its_checkpoint_goes_on_and_says_so(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    first = Launch(run)
    first.step()
    state = first.save()
    first.ledger.close()
    shutil.rmtree(run / "ledger")
    second = Launch(run, state)
    second.step()
    second.end()
    entries = read_ledger(run / "ledger", lambda location, what: None)
    assert len(entries) > 5
    (finding,) = [line for line in audit(run).findings if line.startswith("ledger")]
    assert finding == "ledger/000001.jsonl:1: lineage 0 begins at version 1 without the ledger of earlier steps"


def test_a_folder_without_a_ledger_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)], "asyncrl") == 2
    assert "has no folder 'ledger'" in capsys.readouterr().err


def test_a_prompt_that_was_passed_over_is_found_whoever_played_the_others(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    launch = Launch(run)
    launch.step()
    launch.save()
    launch.end()
    assert audit(run).findings == ()
    file, lines = ledger_of(run)
    gone = next(line["rollout"] for line in lines if line["kind"] == "admitted" and line["order"] == 2)
    write(file, [line for line in lines if line.get("rollout") != gone], sealed=True)
    finding = "places [2] of the data order (1) were passed over"
    assert any(finding in str(found) for found in audit(run).findings)


@pytest.mark.parametrize("steps", [1, 2], ids=["not played yet", "played again"])
def test_a_prompt_that_an_earlier_launch_put_off_is_not_passed_over_and_keeps_its_attempts(
    tmp_path: Path, steps: int
) -> None:
    """A filter returned the prompt at place 7, to be tried after its epoch, which only the next launch comes to."""
    run = begin_run(tmp_path / "run")
    first = Launch(run)
    first.step()
    state = first.save()
    first.ledger.close()
    second = Launch(run, state)
    for _ in range(steps):
        second.step()
    second.end()
    _, lines = ledger_of(run)
    again = [line["attempt"] for line in lines if line["kind"] == "admitted" and line["order"] == 7]
    newest = max(line["order"] for line in lines if line["kind"] == "admitted")
    assert (again, newest > 7) == ([0, 1][:steps], True)
    assert audit(run).findings == ()


def test_a_prompt_whose_later_attempt_was_lost_with_its_lineage_is_not_passed_over(tmp_path: Path) -> None:
    """The second attempt at place 7 comes after place 13; the next lineage plays 13 again, and dies."""
    run = begin_run(tmp_path / "run")
    first = Launch(run)
    for _ in range(3):
        first.step(slow=(7, 13))
    live = {(line.order, line.attempt) for name in first.gate.live if (line := first.gate.live.get(name))}
    assert {(7, 1), (13, 0)} < live
    first.ledger.close()
    second = Launch(run, first.kept)
    again = second.admit(0)
    assert again is not None
    assert again.order == 13
    second.ledger.close()
    assert audit(run).findings == ()


def test_an_adopted_later_attempt_has_its_place_after_its_epoch_though_its_drop_is_ruled_out() -> None:
    """It is lost with the lineage that adopted it; the next one comes to place 2 first."""
    settings, order = RunSettings(1, 1, "drop", WORKERS, SEED), DataOrder(3, SEED)

    def begin(lineage: int, line: int, version: int, after: int) -> Begin:
        numbers = {"lineage": lineage, "line": line, "version": version, "after": after}
        return Begin(**numbers, settings=settings, carried=None, at=0.0, seal="")

    def admitted(location: int, attempt: int, name: str, *, adopted: bool = False) -> Admitted:
        return Admitted(
            name, order.ref(location).prompt_id, location, attempt, "rollout_worker/0", 0, 0.0, adopted=adopted
        )

    lines: list[Line] = [
        begin(0, 1, 0, 0),
        begin(1, 2, 0, 0),
        admitted(0, 1, "again", adopted=True),
        admitted(1, 0, "trained"),
        admitted(2, 0, "slow"),
        Finished("trained", 9, 0.0),
        Trained("trained", order.ref(1).prompt_id, 1, 1, 1, {0: 5}, 1, 1, 0.5),
        Step(lineage=1, step=1, line=8, at=0.0, counts=RolloutCounts(3, 1, running=2), seal=""),
        begin(2, 9, 1, 8),
        admitted(2, 0, "slow again"),
    ]
    findings: list[str] = []

    def report(location: str, what: str) -> None:
        findings.append(f"{location}: {what}")

    entries = [Entry(number, f"line {number}", line) for number, line in enumerate(lines, 1)]
    Replay(3, report).run(surviving_entries(entries, report))
    assert findings == []


def test_a_death_of_the_brain_before_the_first_step_leaves_no_finding(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    first = Launch(run)
    arrived, runs, _ = [ticket for worker in range(3) if (ticket := first.admit(worker)) is not None]
    first.finish(arrived)
    first.ledger.close()
    second = Launch(run, received=first.received(), held=[first.held(runs)])
    assert second.gate.counts().submitted == 2
    second.step()
    second.end()
    found = audit(run)
    assert (found.findings, found.outcome.lost) == ((), 0)


def test_a_rollout_that_a_later_lineage_adopts_is_not_lost(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    first = Launch(run)
    first.step()
    live = first.received()
    assert len(live) == BATCH
    first.ledger.close()
    second = Launch(run, first.kept, received=live[1:])
    second.ledger.close()
    assert audit(run).outcome.lost == 1


@pytest.mark.parametrize("memory", [True, False], ids=["from memory", "from memory, then from disk"])
def test_a_checkpoint_on_disk_outlives_a_death_at_its_version_and_a_run_may_continue_from_it(
    tmp_path: Path, memory: bool
) -> None:
    """What was dropped for good after its step is tried again."""
    run = begin_run(tmp_path / "run")
    first = Launch(run)
    first.step()
    given_up = first.admit(0)
    assert given_up is not None
    first.fail(given_up, "invalid_prompt")
    stored = first.save()
    first.ledger.close()
    second = Launch(run, stored, received=first.received())
    if memory:
        second.step()
        second.end()
    else:
        second.admit(0)
        second.ledger.close()
        third = Launch(run, stored)
        third.step()
        third.end()
    again = [line["order"] for line in ledger_of(run)[1] if line["kind"] == "admitted"].count(given_up.order)
    assert again == (2 if memory else 3)
    assert audit(run).findings == ()


@pytest.mark.parametrize("stopped", [True, False], ids=["after a stop", "after a kill"])
def test_the_checkpoints_of_a_run_that_goes_on_after_a_stop_are_missed(tmp_path: Path, stopped: bool) -> None:
    """A run that was killed may go on from memory, and need have none."""
    run = begin_run(tmp_path / "run")
    first = Launch(run)
    first.step()
    if stopped:
        first.end(total_steps=9)
    else:
        first.ledger.close()
    second = Launch(run, first.kept, received=first.received())
    second.step()
    second.ledger.close()
    (run / "summary.json").unlink(missing_ok=True)
    assert audit(run).findings == ()
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    assert audit(run).findings == ("checkpoints: has no checkpoint, and one was written",) * stopped


@pytest.mark.parametrize("steps", [0, 1, 2], ids=["before its first step", "and went on", "and went on for a step"])
def test_a_run_that_was_stopped_and_begins_anew_needs_no_checkpoint(tmp_path: Path, steps: int) -> None:
    """Where it had one, somebody has removed it."""
    run = begin_run(tmp_path / "run")
    first = Launch(run)
    if steps:
        first.step()
    first.end(total_steps=9)
    if steps:
        second = Launch(run, first.kept)
        if steps == 2:
            second.step()
        second.ledger.close()
    (run / "summary.json").unlink()
    for name in ("checkpoints", "weights", "samples"):
        shutil.rmtree(run / name, ignore_errors=True)
    (run / "metrics.jsonl").write_text("")
    Launch(run).ledger.close()
    assert audit(run).findings == ()


def test_a_checkpoint_of_a_step_that_a_later_lineage_trained_again_is_found(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    first = Launch(run)
    first.step()
    before = first.kept
    first.step()
    line = first.save().gate.line
    first.ledger.close()
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(rows[0])
    second = Launch(run, before)
    second.step()
    second.ledger.close()
    assert audit(run).findings == (
        f"checkpoints/v2: continues after line {line} of the ledger, which is not a step that counts",
    )


def set_back(lines: Lines, number: int, seconds: float) -> Lines:
    """`lines` of a host whose clock was set back before the line `number`."""
    return [
        line | {"at": line["at"] - seconds} if at >= number and "at" in line else line for at, line in enumerate(lines)
    ]


def test_a_clock_that_is_set_back_is_a_note_and_no_finding(
    recorded_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, lines = ledger_of(recorded_run)
    number = next(number for number, line in enumerate(lines) if line["kind"] == "step" and line["step"] == 4)
    write(file, set_back(lines, number, 3600.0), sealed=True)
    found = audit(recorded_run)
    assert found.findings == ()
    note = f"ledger/000001.jsonl:{number + 1}: the clock of the GserverManager was set back by 3595 s"
    assert found.notes == (note,)
    assert main([str(recorded_run)], "asyncrl") == 0
    assert capsys.readouterr().out.startswith(f"note: {note}\n")


def test_what_a_killed_run_may_lack_is_no_finding_and_what_it_must_have_is(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    launch = Launch(run)
    launch.step()
    launch.save()
    launch.step()
    launch.step(evaluated=False)
    launch.ledger.close()
    assert audit(run).findings == (), "the row of step 3 waits for its evaluation"
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("interval: 1", "interval: 2"))
    assert audit(run).findings == (
        "metrics.jsonl: ends with step 2; the ledger's last step is 3, and version 3 waits for no evaluation",
    )
    config.write_text(config.read_text().replace("interval: 2", "interval: 1"))
    shutil.rmtree(run / "weights" / "actor" / "v3")
    assert audit(run).findings == ("weights: the newest is of version 2; the ledger's last step made 3",)


def test_a_later_launch_that_ended_before_its_first_line_is_no_finding(recorded_run: Path) -> None:
    for name in ("summary.json", "books.json"):
        (recorded_run / name).unlink()
    config = recorded_run / "config.yaml"
    config.write_text(config.read_text().replace("max_head_offpolicyness: 1", "max_head_offpolicyness: 2"))
    found = audit(recorded_run)
    assert found.findings == ()


def test_a_finished_run_that_was_cut_is_found(recorded_run: Path) -> None:
    """The ledger's end, half the metrics and all weights are gone."""
    file = recorded_run / "ledger" / "000001.jsonl"
    file.write_bytes(file.read_bytes()[:-600])
    metrics = recorded_run / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    shutil.rmtree(recorded_run / "weights")
    findings = audit(recorded_run).findings
    assert {finding.partition(": ")[0] for finding in findings} >= {"summary.json", "metrics.jsonl", "weights"}


@pytest.mark.parametrize(("versions", "right"), [([0, 0], True), ([1, 0], False), ([0, 99], False), ([-1, 0], False)])
def test_an_opponent_of_a_version_that_did_not_exist_is_found(
    recorded_run: Path, versions: list[int], right: bool
) -> None:
    file, lines = ledger_of(recorded_run)
    number = next(each for each in surviving(lines) if lines[each]["kind"] == "trained")
    lines[number]["opponents"] = {"past": versions}
    write(file, lines, sealed=True)
    findings = audit(recorded_run).findings
    assert (findings == ()) is right, findings
    assert right or "of policy 'past'" in str(findings)
