"""The run's other files, held against the ledger's history: metrics, settings, checkpoints, weights, summary."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import xxhash
from omegaconf import OmegaConf

from asyncrl.observability.audit.history import Report
from asyncrl.observability.audit.outcome import Outcome, StepTotals

_READ_BYTES = 1 << 20
_TOLERANCE = 1e-6
"""Relative; sums are in another order."""
Row: TypeAlias = tuple[str, dict[str, Any]]
"""Where a row of metrics stands, and itself."""


def check_metrics(file: Path, held: Iterable[Row], outcome: Outcome, report: Report) -> None:
    """Rows without a gap, up to the last step, with the means that the ledger's lines give; after those of `file` come
    those that are `held`.
    """
    if not file.is_file():
        report(file.name, "is not there")
        return
    rows = [*_written_rows(file, report)]
    written = rows[-1][1]["step"] if rows else -1
    rows += [(place, row) for place, row in held if row["step"] > written]  # others were written after the checkpoint
    last: int | None = None
    for place, row in rows:
        step, version = row["step"], row["policy_version"]
        if step != version:
            report(place, f"the row of step {step} is of policy version {version}")
        if (last is None and step not in (0, 1)) or (last is not None and step != last + 1):
            report(place, f"the row of step {step} comes after {'nothing' if last is None else f'that of {last}'}")
        last = step
        if step in outcome.steps:
            _check_row(place, row, outcome.steps[step], report)
    if last is not None and last > outcome.version:
        report(file.name, f"has a row of step {last}; the ledger's last step is {outcome.version}")
    if outcome.ended and outcome.version and last != outcome.version:
        report(file.name, f"ends with step {last}; the run ended at {outcome.version}")


def held_rows(summary: Path, checkpoints: Path, outcome: Outcome) -> list[Row]:
    """Rows that a run which was stopped goes on with: of versions that wait for their evaluation, and later ones.
    A run that is complete has written all of its rows.
    """
    folder = checkpoints / f"v{outcome.version}"
    try:
        told = json.loads(summary.read_bytes())
        if told["steps"] >= told["total_steps"]:
            return []
        held = json.loads((folder / "state.json").read_bytes())["master_state"]["journal"]["rows"]
        return [(f"{checkpoints.name}/{folder.name}", _checked({"step": each["step"]} | each["row"])) for each in held]
    except (OSError, ValueError, KeyError, TypeError):  # said where these files are looked at
        return []


def _written_rows(file: Path, report: Report) -> Iterator[Row]:
    for number, raw in enumerate(file.read_bytes().splitlines(keepends=True), 1):
        place = f"{file.name}:{number}"
        if not raw.endswith(b"\n"):
            return  # cut off by a kill; the next launch cuts it away
        try:
            yield place, _checked(json.loads(raw))
        except (ValueError, KeyError, TypeError) as error:
            report(place, f"no row of metrics: {type(error).__name__}: {error}")


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    """`row`; raises KeyError or TypeError where it has not what each has."""
    return row | {name: row[name] for name in ("step", "policy_version")}


def _check_row(place: str, row: Mapping[str, Any], totals: StepTotals, report: Report) -> None:
    samples = max(1, totals.samples)
    means = {
        "reward/mean": totals.reward / max(1, totals.episodes),
        "rollout/samples_per_episode": totals.samples / max(1, totals.episodes),
        "rollout/len_mean": totals.tokens / samples,
        "staleness/mean": totals.ages / max(1, totals.young_tokens),
        "staleness/max": float(totals.oldest_age),
    }
    if totals.whole_tokens is not None:
        means["tokens/batch"] = totals.whole_tokens
    for name, value in means.items():
        if not math.isclose(told := row.get(name, math.nan), value, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
            report(place, f"step {row['step']} has {name} {told}, its rollouts in the ledger have {value:.6g}")


def check_settings(file: Path, outcome: Outcome, report: Report) -> None:
    """The last launch is judged by the settings that it had."""
    if outcome.settings is None or not file.is_file():
        return
    config = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(config, dict), config
    written = {
        "train_batch_size": config["train_batch_size"],
        "max_head_offpolicyness": config["max_head_offpolicyness"],
        "on_stale": str(config["on_stale"]),
        "workers": config["rollout"]["workers"],
        "seed": config["seed"],
    }
    if not outcome.settings.workers:  # a replay, which has none
        del written["workers"]
    for name, value in written.items():
        if (told := getattr(outcome.settings, name)) != value:
            report(file.name, f"{name} is {value}, the ledger's last launch had {told}")


def check_summary(file: Path, outcome: Outcome, report: Report) -> None:
    """The books that the run printed at its end."""
    if not outcome.ended or not file.is_file():
        return
    summary = json.loads(file.read_text(encoding="utf-8"))
    counted = {"trained": outcome.trained, "dropped": dict(outcome.dropped), "abandoned": outcome.abandoned}
    if summary["steps"] != outcome.version:
        report(file.name, f"has {summary['steps']} steps, the ledger {outcome.version}")
    for name, value in counted.items():
        told = summary["books"][name]
        if ({key: count for key, count in told.items() if count} if isinstance(told, dict) else told) != value:
            report(file.name, f"has {name} {told}, the ledger {value}")


def check_checkpoints(root: Path, outcome: Outcome, report: Report) -> None:
    """Every checkpoint is whole, and has used the prompts that the ledger says were used by then."""
    for folder in _versions(root):
        if not check_folder(folder, report):
            continue
        place, state_file = f"{root.name}/{folder.name}", folder / "state.json"
        try:
            master = json.loads(state_file.read_bytes())["master_state"]
            version, line = master["version"], master["ledger"]["line"]
            used = _used_prompts(master["buffer"]["used_prompts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            report(place, f"state.json cannot be read: {type(error).__name__}: {error}")
            continue
        if f"v{version}" != folder.name:
            report(place, f"is of version {version}")
        if line not in outcome.used_at:
            if version <= outcome.version:  # else of a later launch that this history forgot
                report(place, f"goes on from line {line} of the ledger, which is of no checkpoint that is remembered")
        elif outcome.whole and used != (recorded := set(outcome.used[: outcome.used_at[line]])):
            report(
                place,
                f"has {len(used)} used prompts and the ledger {len(recorded)}; {len(used ^ recorded)} are in one only, "
                f"for example {min(used ^ recorded)}",
            )


def check_weights(root: Path, outcome: Outcome, report: Report) -> None:
    """Every published version is whole, and was made by a step."""
    for role in sorted(path for path in root.glob("*") if path.is_dir()):
        for folder in _versions(role):
            check_folder(folder, report)
            if int(folder.name[1:]) > outcome.version:
                report(f"{root.name}/{role.name}/{folder.name}", f"no step made it; the last was {outcome.version}")


def check_folder(folder: Path, report: Report) -> bool:
    """Hold the files of `folder` against its manifest: names, sizes, checksums; whether all is well."""
    place = "/".join(folder.parts[-3:] if folder.parent.parent.name == "weights" else folder.parts[-2:])
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        version, files = manifest["version"], dict(manifest["files"])
    except FileNotFoundError:
        if not folder.exists():  # a run that goes on has removed it meanwhile
            return False
        report(place, "has no manifest.json")
        return False
    except (ValueError, KeyError, TypeError) as error:
        report(place, f"manifest.json cannot be read: {type(error).__name__}: {error}")
        return False
    wrong = [f"its manifest is of version {version}"] if f"v{version}" != folder.name else []
    wrong += [what for name, entry in files.items() if (what := _wrong_with(folder / name, entry)) is not None]
    wrong += [f"{path.name} is in no manifest" for path in sorted(folder.iterdir()) if _is_stray(path, files)]
    for what in wrong:
        report(place, what)
    return not wrong


def _is_stray(path: Path, files: Mapping[str, Any]) -> bool:
    return path.suffix == ".safetensors" and path.name not in files


def _wrong_with(file: Path, entry: Mapping[str, Any]) -> str | None:
    if not file.is_file():
        return f"{file.name} is missing"
    if file.stat().st_size != entry["bytes"]:
        return f"{file.name} has {file.stat().st_size} bytes, its manifest says {entry['bytes']}"
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while part := stream.read(_READ_BYTES):
            digest.update(part)
    if digest.hexdigest() != entry["xxh3"]:
        return f"{file.name} has the checksum {digest.hexdigest()}, its manifest says {entry['xxh3']}"
    return None


def _versions(root: Path) -> Iterator[Path]:
    found = (path for path in root.glob("v*") if path.name[1:].isdecimal())
    yield from sorted(found, key=lambda path: int(path.name[1:]))


def _used_prompts(value: Mapping[str, Any]) -> set[str]:
    """The prompt ids in a checkpoint: of each epoch a bitmap of rows, compressed, in base64; and other ids."""
    used = set(value["others"])
    for epoch, packed in value["epochs"].items():
        bitmap = zlib.decompress(base64.b64decode(packed))
        used |= {
            f"e{epoch}-{byte * 8 + bit}" for byte, bits in enumerate(bitmap) for bit in range(8) if bits >> bit & 1
        }
    return used
