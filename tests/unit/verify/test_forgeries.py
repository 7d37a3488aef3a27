"""Every kind of change to every field of every file of a run: the audit finds it, or `docs/ledger.md` lists it.

A forgery is the new content of one file (None: it is gone), which knows the format: seals, checksums and sizes in
manifests fit again. `UNKNOWABLE` are those that no other file contradicts.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import yaml

from asyncrl.data.prompt_queue import UsedPrompts
from asyncrl.launch.commands.audit import audit
from asyncrl.weights.manifest import FileEntry
from tests.unit.verify.conftest import begin_run, run_of_three_lineages
from tests.unit.verify.test_audit import Lines, changed, ledger_of, surviving
from tests.unit.verify.test_audit import write as write_ledger

Forgery: TypeAlias = tuple[str, dict[Path, bytes | None]]
"""Its name, and by file the new content."""

UNKNOWABLE = {
    "metrics: reward/std",
    "metrics: reward/frac_zero_std",
    "metrics: reward/min",
    "metrics: reward/max",
    "metrics: rollout/len_min",
    "metrics: rollout/len_max",
    "metrics: rollout/context_len_max",
    "metrics: rollout/truncated",
    "metrics: restarts",
    "metrics: rollout/dropped_invalid_prompt",  # removed: rows name the reasons that occurred
    "config: eval",
    "config: samples",
    *(f"ledger: swap 2 {kind}" for kind in ("admitted", "adopted admitted", "finished", "dropped", "abandoned")),
    *(f"ledger: swap {pair}" for pair in ("admitted and finished", "finished and admitted", "finished and trained")),
    *(f"ledger: swap {pair}" for pair in ("dropped and admitted", "finished and adopted admitted")),
    *(
        f"checkpoints/v{version}/state.json: master_state.{name}"
        for version in (2, 5)
        for name in ("metrics_log.rows", "metrics_log.evaluations", "gate.curriculum")
    ),
    "samples: episode",
}
"""What nothing else in a run says, or what the order of two lines does not change."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without kept samples, which take most of an audit's time."""
    folder = a_run(tmp_path_factory.mktemp("forged") / "run")
    shutil.rmtree(folder / "samples")
    return folder


def a_run(folder: Path) -> Path:
    """Three lineages: one continues from a checkpoint on disk, one from memory."""
    begin_run(folder)
    run_of_three_lineages(folder)
    assert audit(folder).findings == ()
    return folder


def missed(forgeries: Iterator[Forgery]) -> set[str]:
    """Names of the forgeries that the audit does not find; each is undone."""
    names = set()
    count = 0
    for name, contents in forgeries:
        count += 1
        before = {file: file.read_bytes() if file.exists() else None for file in contents}
        put(contents)
        if not audit(folder_of(next(iter(contents)))).findings:
            names.add(name)
        put(before)
    assert count > 3
    return names


def put(contents: dict[Path, bytes | None]) -> None:
    for file, data in contents.items():
        if data is None:
            file.unlink()
        else:
            file.write_bytes(data)


def kind_of(line: dict[str, Any]) -> str:
    return f"adopted {line['kind']}" if line.get("adopted") else str(line["kind"])


def folder_of(file: Path) -> Path:
    return next(path for path in file.parents if (path / "ledger").is_dir())


def altered(value: Any) -> Any:
    match value:
        case None:
            return 1
        case list():
            return value[:-1] if value else [1]
        case dict() if value and not all(isinstance(each, int) for each in value.values()):
            return {key: item for key, item in value.items() if key != next(iter(value))}
        case str() if not value:
            return "x"
        case _:
            return changed(value)


def fields(value: Any, deep: int) -> Iterator[tuple[str, ...]]:
    """The paths to the values in nested objects, `deep` levels down."""
    for key, item in value.items():
        if isinstance(item, dict) and item and deep > 1:
            yield from ((key, *rest) for rest in fields(item, deep - 1))
        else:
            yield (key,)


def with_field(value: Any, path: tuple[str, ...], change: Callable[[dict[str, Any], str], None]) -> Any:
    forged = copy.deepcopy(value)
    target = forged
    for key in path[:-1]:
        target = target[key]
    change(target, path[-1])
    return forged


def alter(target: dict[str, Any], key: str) -> None:
    target[key] = altered(target[key])


def remove(target: dict[str, Any], key: str) -> None:
    del target[key]


def document(file: Path, deep: int, name: str = "") -> Iterator[Forgery]:
    """Each field of a JSON file altered and removed; the file gone, cut off, and no JSON."""
    value = json.loads(file.read_bytes())
    for path in fields(value, deep):
        for change in (alter, remove):
            forged = with_field(value, path, change)
            yield f"{name or file.name}: {'.'.join(path)}", {file: json.dumps(forged).encode()}
    yield f"{file.name}: gone", {file: None}
    for data in (file.read_bytes()[:-2], b"[]", b"{}", b"null", b"\xff", b"", b"[" * 100_000):
        yield f"{file.name}: {data[:5]!r}", {file: data}


class ForgedLedger:
    """Changes of the ledger of `run` by somebody who knows the format: seals fit, and so do the lines' numbers in
    `begin` lines and checkpoints.

    Args:
        aside: a file to write to.
    """

    def __init__(self, run: Path, aside: Path) -> None:
        self.run, self._aside = run, aside
        self.file, self.lines = ledger_of(run)

    def write(self, made: Lines) -> dict[Path, bytes | None]:
        """`made` in place of the lines."""
        write_ledger(self._aside, made, sealed=True)
        return {self.file: self._aside.read_bytes()}

    def change(self, change: Callable[[Lines], None]) -> dict[Path, bytes | None]:
        """The lines after `change`, as many as before."""
        made = copy.deepcopy(self.lines)
        change(made)
        return self.write(made)

    def move(self, made: Lines, number: int) -> dict[Path, bytes | None]:
        """`made` in place of the lines, which has more or fewer from place `number` on."""
        shift, made = len(made) - len(self.lines), copy.deepcopy(made)
        for line in made:
            if line["kind"] == "begin" and line["after"] > number:
                line["after"] += shift
        contents = self.write(made)
        for folder in (self.run / "checkpoints").iterdir():
            state = json.loads((folder / "state.json").read_bytes())
            if (gate := state["master_state"]["gate"])["line"] > number:
                gate["line"] += shift
            contents |= with_state(folder, state)
        return contents


def with_state(folder: Path, state: Any) -> dict[Path, bytes | None]:
    """A checkpoint with another state, which its manifest lists."""
    listed, data = json.loads((folder / "manifest.json").read_bytes()), json.dumps(state).encode()
    entry = FileEntry.of([data])
    files = listed["files"] | {"state.json": {"bytes": entry.bytes, "xxh3": entry.xxh3}}
    return {folder / "state.json": data, folder / "manifest.json": json.dumps(listed | {"files": files}).encode()}


def test_ledger(run: Path, tmp_path: Path) -> None:
    forged = ForgedLedger(run, tmp_path / "forged")
    file, lines = forged.file, forged.lines
    kept = surviving(lines)

    def forgeries() -> Iterator[Forgery]:
        seen: set[str | tuple[str, str]] = set()
        for number in kept:
            kind = kind_of(lines[number])
            if kind not in seen:
                seen.add(kind)
                yield f"ledger: delete {kind}", forged.move(lines[:number] + lines[number + 1 :], number)
                yield f"ledger: duplicate {kind}", forged.move(lines[: number + 1] + lines[number:], number)
            if number + 1 in kept and (pair := (kind, kind_of(lines[number + 1]))) not in seen:
                seen.add(pair)
                name = f"2 {kind}" if pair[0] == pair[1] else " and ".join(pair)
                swapped = [*lines[:number], lines[number + 1], lines[number], *lines[number + 2 :]]
                yield f"ledger: swap {name}", forged.write(swapped)
        whole = file.read_bytes()
        ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
        for end in ends[:-1:10]:
            yield f"ledger: cut at {end}", {file: whole[:end]}
        yield "ledger: cut in a line", {file: whole[:-100]}

    assert missed(forgeries()) - UNKNOWABLE == set()


class Line:
    """Places of lines in the run of three lineages."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.begins = [number for number, line in enumerate(lines) if line["kind"] == "begin"]

    def of(self, kind: str, since: int = 0, **has: Any) -> int:
        """The first line of this kind from place `since` on that `has` these values."""
        for number, line in enumerate(self.lines[since:], since):
            if line["kind"] == kind and all(line.get(name) == value for name, value in has.items()):
                return number
        raise LookupError(kind, has)


def continues(after: Callable[[Line], int], version: int = 4) -> Callable[[Lines], None]:
    """The third lineage continues after the line at the place `after`, at `version`."""

    def change(made: Lines) -> None:
        at = Line(made)
        made[at.begins[2]] |= {"after": after(at) + 1, "version": version}

    return change


BEGINNINGS: dict[str, tuple[Callable[[Lines], None], str]] = {
    "after a line in the middle": (
        continues(lambda at: at.of("step", step=4) - 1),
        "), which is not the end of a step",
    ),
    "after the line of a rollout": (
        continues(lambda at: at.of("admitted", at.begins[1])),
        "), which is not the end of a step",
    ),
    "after its predecessor's beginning": (continues(lambda at: at.begins[1], 2), "), which is not the end of a step"),
    "after a step of another version": (
        continues(lambda at: at.of("step", at.begins[1], step=3)),
        "begins at version 4 after step 3",
    ),
    "after an earlier step": (continues(lambda at: at.of("step", at.begins[1], step=3), 3), "step 5 after step 3"),
    "after a ruled-out step": (continues(lambda at: at.of("step", step=3), 3), "), which was ruled out"),
    "after a ruled-out rollout": (continues(lambda at: at.of("step", step=3) - 1), "), which is not the end of a step"),
    "after itself": (continues(lambda at: at.begins[2]), "which does not exist"),
    "after the last line": (continues(lambda at: len(at.lines)), "which does not exist"),
    "before the first line": (continues(lambda at: -3), "after line -2, which does not exist"),
    "from nothing": (continues(lambda at: -1), "begins at version 4 without a checkpoint"),
    "from the beginning": (continues(lambda at: -1, 0), "step 5 after step 0"),
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_lineage_that_continues_after_a_line_without_its_state_is_found(run: Path, tmp_path: Path, name: str) -> None:
    change, says = BEGINNINGS[name]
    assert_found(ForgedLedger(run, tmp_path / "forged").change(change), says)


def adopt(**changes: Any) -> Callable[[Lines], None]:
    """The last lineage adopts one more rollout: a copy of its first adopted one with `changes`."""

    def change(made: Lines) -> None:
        number = Line(made).of("admitted", adopted=True)
        made.insert(number + 1, made[number] | {"rollout": "other"} | changes)

    return change


def adopt_trained(made: Lines) -> None:
    """The last lineage adopts a rollout of which the step before it was made."""
    at = Line(made)
    rollout = made[at.of("step", step=4) - 1]["rollout"]
    made.insert(at.begins[2] + 1, made[at.of("admitted", rollout=rollout)] | {"adopted": True})


def adopt_used(made: Lines) -> None:
    """The last lineage adopts another rollout of a prompt that was trained."""
    at = Line(made)
    used = made[at.of("step", step=4) - 1]
    head = made[at.of("admitted", rollout=used["rollout"])]
    made.insert(at.begins[2] + 1, head | {"rollout": "other", "adopted": True})


def in_first_lineage(made: Lines) -> None:
    made[Line(made).of("admitted")]["adopted"] = True


def not_adopted(made: Lines) -> None:
    del made[Line(made).of("admitted", worker="nobody/0")]["adopted"]


def never_finished(made: Lines) -> None:
    """The line that the trainer has a rollout of the last step is gone."""
    at = Line(made)
    rollout = made[at.of("step", step=5) - 1]["rollout"]
    del made[at.of("finished", at.begins[2], rollout=rollout)]


def two_at_once(made: Lines) -> None:
    """The gate admits another rollout of a prompt of which one runs."""
    number = Line(made).of("admitted")
    made.insert(number + 1, made[number] | {"rollout": "other"})


def after_the_end(made: Lines) -> None:
    made.append(made[Line(made).of("step", step=5)])


ROLLOUTS: dict[str, tuple[Callable[[Lines], None], str]] = {
    "adopted without a lineage before": (in_first_lineage, "was adopted, and no lineage came before"),
    "adopted after it was trained": (adopt_trained, "was admitted before, at ledger/000001.jsonl:"),
    "adopted after its prompt was trained": (adopt_used, " was trained at step 4 (ledger/000001.jsonl:"),
    "adopted beside another of its prompt": (adopt(), "rollout other was admitted, and rollout "),
    "admitted beside another of its prompt": (two_at_once, "rollout other was admitted, and rollout "),
    "adopted at a version that is not there yet": (adopt(version=5), "was admitted at version 5, after step 4"),
    "adopted for another prompt": (adopt(prompt="e0-0", order=-1), "prompt e0-0 is at place -1"),
    "of nobody and not adopted": (not_adopted, "was admitted for nobody/0, and not adopted"),
    "trained and not finished": (never_finished, "was trained and running before: it does not count"),
    "after the end": (after_the_end, "a line after the end of its lineage"),
}


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_rollout_that_the_gate_cannot_have_let_in_is_found(run: Path, tmp_path: Path, name: str) -> None:
    change, says = ROLLOUTS[name]
    assert_found(ForgedLedger(run, tmp_path / "forged").change(change), says)


def at_line(location: Callable[[Line], int]) -> Callable[[dict[str, Any], Line], None]:
    """The checkpoint continues after the line at this place."""

    def change(gate: dict[str, Any], at: Line) -> None:
        gate["line"] = location(at) + 1

    return change


def without_a_used_prompt(gate: dict[str, Any], at: Line) -> None:
    gate["used"] = UsedPrompts(list(UsedPrompts.from_json(gate["used"]))[1:]).to_json()


def with_another_used_prompt(gate: dict[str, Any], at: Line) -> None:
    gate["used"] = UsedPrompts([*UsedPrompts.from_json(gate["used"]), "e3-1"]).to_json()


def without_tries(gate: dict[str, Any], at: Line) -> None:
    gate["retries"] = [each for each in gate["retries"] if not any(each[1:])]


def with_more_tries(gate: dict[str, Any], at: Line) -> None:
    gate["retries"] = [[order, attempt + 1, failures] for order, attempt, failures in gate["retries"]]


def without_drops(gate: dict[str, Any], at: Line) -> None:
    gate["dropped"] = {}


NOWHERE = "which is not a step that counts"
CHECKPOINTS: dict[str, tuple[Callable[[dict[str, Any], Line], None], str]] = {
    "after a rollout": (at_line(lambda at: at.of("admitted")), NOWHERE),
    "after a beginning": (at_line(lambda at: at.begins[1]), NOWHERE),
    "after nothing": (at_line(lambda at: -1), NOWHERE),
    "after a line before the first": (at_line(lambda at: -2), NOWHERE),
    "after more lines than there are": (at_line(lambda at: len(at.lines)), NOWHERE),
    "after a ruled-out step": (at_line(lambda at: at.of("step", step=3)), NOWHERE),
    "after an earlier step": (at_line(lambda at: at.of("step", step=1)), "its line of the ledger is of 1"),
    "without a used prompt": (without_a_used_prompt, "used prompts and the ledger "),
    "with another used prompt": (with_another_used_prompt, "1 are in one only, for example e3-1"),
    "without the tries": (
        without_tries,
        "has other tries (order, attempt, failures) than the ledger, for example (7, ",
    ),
    "with more tries": (
        with_more_tries,
        "has other tries (order, attempt, failures) than the ledger, for example (7, ",
    ),
    "without drops": (without_drops, "has dropped {}, its line of the ledger {"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_whose_gate_is_not_that_of_its_line_is_found(run: Path, name: str) -> None:
    change, says = CHECKPOINTS[name]
    folder = run / "checkpoints" / "v2"
    state = json.loads((folder / "state.json").read_bytes())
    change(state["master_state"]["gate"], Line(ledger_of(run)[1]))
    assert_found(with_state(folder, state), says)


def assert_found(contents: dict[Path, bytes | None], says: str) -> None:
    """The audit says so of the forgery, which is undone."""
    before: dict[Path, bytes | None] = {file: file.read_bytes() for file in contents}
    put(contents)
    findings = audit(folder_of(next(iter(contents)))).findings
    put(before)
    assert any(says in finding for finding in findings), findings


def test_changes_of_several_lines_that_agree(run: Path, tmp_path: Path) -> None:
    """What nobody can tell from the files: the same names of `docs/ledger.md` as limits."""
    forged = ForgedLedger(run, tmp_path / "forged")

    def equal_sum(made: Lines) -> None:
        one, other = [line for line in made if line["kind"] == "trained" and line["step"] == 1][:2]
        one["reward"] += 0.25
        other["reward"] -= 0.25

    def rename(made: Lines, worker: str) -> None:
        for line in made:
            if line.get("worker") == "rollout_worker/0":
                line["worker"] = worker

    def own(made: Lines) -> None:
        """An adopted rollout of a worker, as if the lineage had admitted it."""
        next(line for line in made if line.get("adopted") and line["worker"] != "nobody/0").pop("adopted")

    def adopted(made: Lines) -> None:
        """A rollout that the last lineage admitted, as if another had."""
        at = Line(made)
        made[at.of("admitted", at.begins[2], adopted=None)]["adopted"] = True

    forgeries = [
        ("equal sum", forged.change(equal_sum)),
        ("adopted", forged.change(adopted)),
        ("renamed", forged.change(lambda made: rename(made, "rollout_worker/1"))),
        ("renamed beyond", forged.change(lambda made: rename(made, "rollout_worker/99"))),
        ("not adopted", forged.change(own)),
    ]
    assert missed(iter(forgeries)) == {name for name, _ in forgeries}


def test_metrics(run: Path) -> None:
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]

    def text(forged: list[dict[str, Any]]) -> bytes:
        return "".join(json.dumps(row) + "\n" for row in forged).encode()

    def forgeries() -> Iterator[Forgery]:
        for number in (3, len(rows) - 1):
            for path in fields(rows[number], 1):
                for change in (alter, remove):
                    forged = [*rows[:number], with_field(rows[number], path, change), *rows[number + 1 :]]
                    yield f"metrics: {path[0]}", {file: text(forged)}
        for number in range(len(rows)):
            yield f"metrics: delete {number}", {file: text(rows[:number] + rows[number + 1 :])}
            yield f"metrics: duplicate {number}", {file: text(rows[: number + 1] + rows[number:])}
        for number in range(len(rows) - 1):
            swapped = [*rows[:number], rows[number + 1], rows[number], *rows[number + 2 :]]
            yield f"metrics: swap {number}", {file: text(swapped)}
        for data in (b"", text(rows)[:-5], text(rows) + b"[]\n", text(rows) + b"[" * 100_000 + b"\n", b"\xff\n"):
            yield f"metrics: {data[-5:]!r}", {file: data}
        yield "metrics: gone", {file: None}

    assert missed(forgeries()) - UNKNOWABLE == set()


@pytest.mark.parametrize("name", ["summary.json", "books.json"])
def test_summary_and_counts(run: Path, name: str) -> None:
    assert missed(document(run / name, 3)) == set()


def test_config_and_data_record(run: Path) -> None:
    file = run / "config.yaml"
    value = yaml.safe_load(file.read_text())

    def forgeries() -> Iterator[Forgery]:
        for path in fields(value, 2):
            for change in (alter, remove):
                forged = with_field(value, path, change)
                yield f"config: {path[0]}", {file: yaml.safe_dump(forged).encode()}
        for data in (b"", b": : [", b"a: 1\n", b"\xff", None):
            yield f"config: {data!r}", {file: data}

    assert missed(forgeries()) - UNKNOWABLE == set()
    assert missed(document(run / "data_record.json", 1)) == set()


def test_weights(run: Path) -> None:
    folder = run / "weights" / "actor" / "v5"
    assert missed(document(folder / "manifest.json", 3)) == set()

    def forgeries() -> Iterator[Forgery]:
        for name in ("model.safetensors", "config.json", "manifest.json"):
            data = (folder / name).read_bytes()
            yield f"{name}: gone", {folder / name: None}
            yield f"{name}: cut", {folder / name: data[:-1]}
            yield f"{name}: flipped", {folder / name: data[:-1] + bytes([data[-1] ^ 1])}
        yield "stray", {folder / "more.txt": b"x"}
        listed = json.loads((folder / "manifest.json").read_bytes())
        for name in ("../v4/config.json", "/etc/hostname", "manifest.json", "."):
            stray = {name: {"bytes": 2, "xxh3": "0" * 16}}
            forged = listed | {"files": listed["files"] | stray}
            yield f"manifest: lists {name}", {folder / "manifest.json": json.dumps(forged).encode()}
        data = (folder / "model.safetensors").read_bytes()
        for forged_data in (b"", b"\xff" * 8, data.replace(b"F32", b"F16"), data.replace(b'"w"', b'"x"')):
            entry = FileEntry.of([forged_data])
            files = listed["files"] | {"model.safetensors": {"bytes": entry.bytes, "xxh3": entry.xxh3}}
            manifest = json.dumps(listed | {"files": files}).encode()
            contents: dict[Path, bytes | None] = {folder / "model.safetensors": forged_data}
            contents[folder / "manifest.json"] = manifest
            yield f"model.safetensors: {forged_data[:3]!r}", contents

    assert missed(forgeries()) == set()


@pytest.mark.parametrize("version", [2, 5])
def test_checkpoints(run: Path, version: int) -> None:
    folder = run / "checkpoints" / f"v{version}"
    state = json.loads((folder / "state.json").read_bytes())
    location = f"checkpoints/v{version}/state.json"

    def forgeries() -> Iterator[Forgery]:
        for path in fields(state, 5):
            for change in (alter, remove):
                yield f"{location}: {'.'.join(path[:3])}", with_state(folder, with_field(state, path, change))
        values: tuple[Any, ...] = ([], {}, None, 1)
        for value in values:
            yield f"{location}: {value!r}", with_state(folder, value)

    assert missed(forgeries()) - UNKNOWABLE == set()
    assert missed(document(folder / "manifest.json", 2)) == set()


def test_samples(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    from asyncrl.observe.samples import per_token_columns, schema

    folder = a_run(tmp_path / "run") / "samples"
    file = folder / "step-00000005.head-0.parquet"
    rows = pq.read_table(file).to_pylist(maps_as_pydicts="strict")

    def parquet(forged: list[dict[str, Any]]) -> bytes:
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(forged, schema=schema()), sink)
        data: bytes = sink.getvalue().to_pybytes()
        return data

    def forgeries() -> Iterator[Forgery]:
        judged = ("step", "rollout", "prompt", "order", "sample", "episode", "total_reward", "staleness", "segments")
        for name in (*judged, "tokens", "loss_mask", "versions", "behave_logprobs"):
            forged = copy.deepcopy(rows)
            value = forged[1][name]
            if name in ("loss_mask", "versions", "behave_logprobs"):
                forged[1][name] = [value[0] + 1, *value[1:]]
            else:
                forged[1][name] = altered(value)
            yield f"samples: {name}", {file: parquet(forged)}
        for name in per_token_columns():
            longer = [*(rows[1][name] or rows[1]["loss_mask"]), 0]
            yield f"samples: length of {name}", {file: parquet([rows[0], rows[1] | {name: longer}, *rows[2:]])}
        forged = [rows[0], rows[1] | {"token_columns": {"own": [0.5]}}, *rows[2:]]
        yield "samples: length of token_columns", {file: parquet(forged)}
        yield "samples: delete", {file: parquet(rows[1:])}
        yield "samples: delete rollout", {file: parquet(rows[2:])}
        yield "samples: duplicate", {file: parquet(rows[:1] + rows)}
        yield "samples: swap", {file: parquet([rows[1], rows[0], *rows[2:]])}
        yield "samples: swap rollouts", {file: parquet([rows[0] | {"rollout": rows[2]["rollout"]}, *rows[1:]])}
        other = (folder / "step-00000004.head-0.parquet").read_bytes()
        for data in (b"", b"PAR1", other, file.read_bytes()[:-10]):
            yield f"samples: {len(data)} bytes", {file: data}
        yield "samples: of another step", {folder / "step-00000009.head-0.parquet": other}
        yield "samples: another name", {folder / "more.parquet": other}
        renamed = pq.read_table(file).rename_columns([f"{name}s" for name in schema().names])
        sink = pa.BufferOutputStream()
        pq.write_table(renamed, sink)
        yield "samples: other columns", {file: sink.getvalue().to_pybytes()}

    assert missed(forgeries()) - UNKNOWABLE == set()


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml", "summary.json", "books.json", "metrics.jsonl", "data_record.json", "ledger/000001.jsonl",
        "checkpoints", "checkpoints/v5", "weights", "weights/actor", "weights/actor/v5",
    ],
)  # fmt: skip
def test_what_a_finished_run_must_have(run: Path, tmp_path: Path, name: str) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    gone = copied / name
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    assert audit(copied).findings
