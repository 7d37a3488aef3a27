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

from asyncrl.launch.commands.audit import audit
from asyncrl.models.weights.versions.manifest import FileEntry
from tests.unit.verify.conftest import Launch, begin_run
from tests.unit.verify.test_audit import changed, ledger_of, surviving
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
    *(f"ledger: swap 2 {kind}" for kind in ("admitted", "finished", "dropped", "abandoned")),
    *(f"ledger: swap {pair}" for pair in ("admitted and finished", "finished and admitted", "finished and trained")),
    "ledger: swap dropped and admitted",
    "checkpoints/v2/state.json: master_state.metrics_log",
    "checkpoints/v5/state.json: master_state.metrics_log",
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
    """A launch of two steps and a checkpoint, then one that goes on to the fifth step and ends."""
    begin_run(folder)
    first = Launch(folder)
    first.step()
    first.step()
    state = first.save()
    first.ledger.close()
    second = Launch(folder, state)
    for _ in range(3):
        second.step()
    second.save()
    second.end()
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


def test_ledger(run: Path, tmp_path: Path) -> None:
    file, lines = ledger_of(run)
    kept = surviving(lines)
    aside = tmp_path / "forged"

    def sealed(forged: list[dict[str, Any]]) -> bytes:
        shift = len(forged) - len(lines)
        later = copy.deepcopy(forged)
        for line in later:
            if line["kind"] == "begin" and line["after"]:
                line["after"] += shift
        write_ledger(aside, later, sealed=True)
        return aside.read_bytes()

    def forgeries() -> Iterator[Forgery]:
        seen = set()
        for number in kept:
            kind = lines[number]["kind"]
            if kind not in seen:
                seen.add(kind)
                yield f"ledger: delete {kind}", {file: sealed(lines[:number] + lines[number + 1 :])}
                yield f"ledger: duplicate {kind}", {file: sealed(lines[: number + 1] + lines[number:])}
            if number + 1 in kept and (pair := (kind, lines[number + 1]["kind"])) not in seen:
                seen.add(pair)
                name = f"2 {kind}" if pair[0] == pair[1] else " and ".join(pair)
                swapped = [*lines[:number], lines[number + 1], lines[number], *lines[number + 2 :]]
                yield f"ledger: swap {name}", {file: sealed(swapped)}
        whole = file.read_bytes()
        ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
        for end in ends[:-1:10]:
            yield f"ledger: cut at {end}", {file: whole[:end]}
        yield "ledger: cut in a line", {file: whole[:-100]}

    assert missed(forgeries()) - UNKNOWABLE == set()


def test_changes_of_several_lines_that_agree(run: Path, tmp_path: Path) -> None:
    """What nobody can tell from the files: the same names of `docs/ledger.md` as limits."""
    file, lines = ledger_of(run)
    aside = tmp_path / "forged"

    def forged(name: str, change: Callable[[list[dict[str, Any]]], None]) -> Forgery:
        made = copy.deepcopy(lines)
        change(made)
        write_ledger(aside, made, sealed=True)
        return name, {file: aside.read_bytes()}

    def equal_sum(made: list[dict[str, Any]]) -> None:
        one, other = [line for line in made if line["kind"] == "trained" and line["step"] == 1][:2]
        one["reward"] += 0.25
        other["reward"] -= 0.25

    def rename(made: list[dict[str, Any]], worker: str) -> None:
        for line in made:
            if line.get("worker") == "rollout_worker/0":
                line["worker"] = worker

    def no_books(made: list[dict[str, Any]]) -> None:
        for line in made:
            if line["kind"] in ("step", "saved"):
                line["books"] = None

    forgeries = [
        forged("equal sum", equal_sum),
        forged("renamed", lambda made: rename(made, "rollout_worker/1")),
        forged("renamed beyond", lambda made: rename(made, "rollout_worker/99")),
        forged("no books", no_books),
    ]
    assert missed(iter(forgeries)) == {"equal sum", "renamed", "renamed beyond", "no books"}


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
def test_summary_and_books(run: Path, name: str) -> None:
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
            entry = {name: {"bytes": 2, "xxh3": "0" * 16}}
            forged = listed | {"files": listed["files"] | entry}
            yield f"manifest: lists {name}", {folder / "manifest.json": json.dumps(forged).encode()}
        data = (folder / "model.safetensors").read_bytes()
        for forged_data in (b"", b"\xff" * 8, data.replace(b"F32", b"F16"), data.replace(b'"w"', b'"x"')):
            entry = FileEntry.of([forged_data])
            files = listed["files"] | {"model.safetensors": {"bytes": entry.bytes, "xxh3": entry.xxh3}}
            manifest = json.dumps(listed | {"files": files}).encode()
            contents = {folder / "model.safetensors": forged_data, folder / "manifest.json": manifest}
            yield f"model.safetensors: {forged_data[:3]!r}", contents

    assert missed(forgeries()) == set()


@pytest.mark.parametrize("version", [2, 5])
def test_checkpoints(run: Path, version: int) -> None:
    folder = run / "checkpoints" / f"v{version}"
    listed = json.loads((folder / "manifest.json").read_bytes())
    state = json.loads((folder / "state.json").read_bytes())
    place = f"checkpoints/v{version}/state.json"

    def resealed(name: str, forged: Any) -> Forgery:
        data = json.dumps(forged).encode()
        entry = FileEntry.of([data])
        files = listed["files"] | {"state.json": {"bytes": entry.bytes, "xxh3": entry.xxh3}}
        manifest = json.dumps(listed | {"files": files}).encode()
        return name, {folder / "state.json": data, folder / "manifest.json": manifest}

    def forgeries() -> Iterator[Forgery]:
        for path in fields(state, 5):
            for change in (alter, remove):
                yield resealed(f"{place}: {'.'.join(path[:2])}", with_field(state, path, change))
        for value in ([], {}, None, 1):
            yield resealed(f"{place}: {value!r}", value)

    assert missed(forgeries()) - UNKNOWABLE == set()
    assert missed(document(folder / "manifest.json", 2)) == set()


def test_samples(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    from asyncrl.observe.samples import per_token_columns, schema

    folder = a_run(tmp_path / "run") / "samples"
    file = folder / "step-00000004.head-0.parquet"
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
        other = (folder / "step-00000003.head-0.parquet").read_bytes()
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
