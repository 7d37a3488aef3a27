"""Kept samples: Parquet files with a row per sample, `docs/samples.md` describes the columns. Needs pyarrow.

A file, `samples/step-<step>.<writer>.parquet`, has the samples that one writer kept of one train step, and is written
atomically. So a launch that forgets steps removes their files, and rotation removes the oldest ones. Answers of
evaluations are kept in the same way, in a file for each version and a folder for each set.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.api.trajectory import Sample, Trajectory
from asyncrl.comm.files import remove_leftover

Row: TypeAlias = dict[str, Any]
"""A sample by column."""
Scores: TypeAlias = Mapping[str, NDArray[np.float32]]
"""Values `[T]` of all samples of a trajectory, end to end, by the name of a per-token column."""

TOKEN_SCORES = ("prox_logprobs", "ref_logprobs", "advantages")
"""Columns that training adds to a sample's tokens; null if it did not."""

_FILE = re.compile(r"step-[0-9]+\..*")
_log = logging.getLogger(__name__)


def schema() -> Any:
    """Return the columns of a file, as a pyarrow schema."""
    import pyarrow as pa

    numbers = pa.map_(pa.string(), pa.float64())
    segment = pa.struct(
        [
            ("generated", pa.bool_()),
            ("version", pa.int32()),
            ("start", pa.int32()),
            ("stop", pa.int32()),
            ("text", pa.string()),
        ]
    )
    picture = pa.struct(
        [("position", pa.int32()), ("length", pa.int32()), ("sha256", pa.string()), ("data", pa.binary())]
    )
    tokens = [("tokens", pa.int32()), ("loss_mask", pa.uint8()), ("versions", pa.int32())]
    scores = [(name, pa.float32()) for name in ("behave_logprobs", *TOKEN_SCORES, "token_rewards")]
    return pa.schema(
        [
            ("step", pa.int64()),
            ("rollout", pa.string()),
            ("prompt", pa.string()),
            ("order", pa.int64()),
            ("sample", pa.int32()),
            ("episode", pa.int32()),
            ("group", pa.string()),
            ("reward", pa.float64()),
            ("total_reward", pa.float64()),
            ("reward_parts", numbers),
            ("metrics", numbers),
            ("token_columns", pa.map_(pa.string(), pa.list_(pa.float32()))),
            ("rollout_metrics", numbers),
            ("truncated", pa.bool_()),
            ("staleness", pa.int32()),
            ("text", pa.string()),
            ("segments", pa.list_(segment)),
            ("pictures", pa.list_(picture)),
            *((name, pa.list_(kind)) for name, kind in (*tokens, *scores)),
            ("set", pa.string()),
            ("right", pa.bool_()),
        ]
    )


@cache
def per_token_columns() -> tuple[str, ...]:
    """Return the names of the columns with a number for each token."""
    from pyarrow.types import is_list, is_nested

    return tuple(each.name for each in schema() if is_list(each.type) and not is_nested(each.type.value_type))


def rows_of(trajectory: Trajectory, step: int, decode: Callable[[Sequence[int]], str], scores: Scores) -> list[Row]:
    """Convert a trajectory to rows; `step` is the version made by the step that trained it, 0 if none did."""
    rows, start = [], 0
    written: set[str] = set()
    for number, sample in enumerate(trajectory.samples):
        stop = start + len(sample.tokens)
        own = {name: values[start:stop] for name, values in scores.items()}
        rows.append(_row(trajectory, number, sample, step, decode, own) | {"pictures": _pictures(sample, written)})
        start = stop
    return rows


def write_samples(folder: Path, step: int, writer: str, rows: Sequence[Row], max_bytes: int) -> Path:
    """Write `rows` as the file of `step` and `writer`; then remove this writer's oldest ones beyond `max_bytes`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"step-{step:08d}.{writer}.parquet"
    aside = file.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema()), aside, compression="zstd")
    os.replace(aside, file)
    own = sorted(_found(folder, f"step-*.{writer}.parquet"))
    sizes = [path.stat().st_size for path in own]
    total = sum(sizes)
    for path, size in zip(own[:-1], sizes[:-1], strict=True):  # the newest file stays, whatever its size
        if total <= max_bytes:
            break
        remove_leftover(path, _log)
        total -= size
    return file


def forget_after(folder: Path, step: int, writer: str) -> None:
    """Remove the samples of `writer` after `step`, from which a launch resumes and trains these steps again."""
    for path in _found(folder, f"step-*.{writer}.parquet"):
        if step_of(path) > step:
            remove_leftover(path, _log)


def sample_files(folder: Path) -> list[Path]:
    """Return the files in `folder`, by step and writer."""
    return sorted(_found(folder, "step-*.parquet"))


def answer_files(folder: Path) -> list[Path]:
    """Return the files of kept answers in `folder`, which has a folder for each evaluation set: by version, set and
    writer.
    """
    return sorted(_found(folder, "*/step-*.parquet"), key=lambda file: (step_of(file), file.parent.name, file.name))


def _found(folder: Path, pattern: str) -> list[Path]:
    """Return the files of `pattern` that have the number of a step in their names; others are somebody else's."""
    return [file for file in folder.glob(pattern) if _FILE.fullmatch(file.name)]


def step_of(file: Path) -> int:
    """Return the step of a file that `sample_files` or `answer_files` returned."""
    return int(file.name.removeprefix("step-").partition(".")[0])


def read_samples(files: Iterable[Path], columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows of `files`, one after the other, in the data order within each file.

    Raises:
        ValueError: a file is not a file of samples; the message names it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in files:
        try:
            table = pq.read_table(file, columns=None if columns is None else list(columns))
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{file} is not a file of samples: {str(error).strip().splitlines()[0]}") from error
        yield from table.to_pylist(maps_as_pydicts="strict")


def trajectories(rows: Iterable[Row]) -> Iterator[tuple[int, Trajectory]]:
    """Yield the trajectories of these rows, each with the step that trained it; the inverse of `rows_of`. Rows of a
    rollout are adjacent.

    Raises:
        ValueError: a row is not a valid sample.
    """
    group: list[Row] = []
    for row in rows:
        if group and row["rollout"] != group[0]["rollout"]:
            yield _trajectory(group)
            group = []
        group.append(row)
    if group:
        yield _trajectory(group)


def _trajectory(group: Sequence[Row]) -> tuple[int, Trajectory]:
    first, pictures = group[0], pictures_of(group)
    samples = [_sample(row, pictures) for row in group]
    made = Trajectory(first["rollout"], first["prompt"], first["order"], samples, dict(first["rollout_metrics"] or {}))
    return first["step"], made


def pictures_of(rows: Iterable[Row]) -> dict[str, Picture]:
    """Return the pictures of rows by hash. A file has the bytes of a picture in the first row of a rollout that shows
    it.

    Raises:
        ValueError: the bytes do not have the hash that is stored beside them.
    """
    return {
        each["sha256"]: Picture.received(each["data"], each["sha256"])
        for row in rows
        for each in row.get("pictures") or ()
        if each["data"] is not None
    }


def _pictures(sample: Sample, written: set[str]) -> list[Row]:
    """Return the pictures of a row. A picture that is not in `written` is returned with its bytes, and added to it."""
    rows = []
    for placed in sample.pictures:
        sha256 = placed.picture.sha256
        data = None if sha256 in written else placed.picture.data
        written.add(sha256)
        rows.append({"position": placed.position, "length": placed.length, "sha256": sha256, "data": data})
    return rows


def _placed(row: Row, pictures: Mapping[str, Picture]) -> tuple[PlacedPicture, ...]:
    shown = row.get("pictures") or ()
    if any(each["sha256"] not in pictures for each in shown):
        raise ValueError(f"rollout {row['rollout']!r} shows a picture whose bytes its rows do not have")
    return tuple(PlacedPicture(each["position"], each["length"], pictures[each["sha256"]]) for each in shown)


def _sample(row: Row, pictures: Mapping[str, Picture]) -> Sample:
    rewards = row["token_rewards"]
    return Sample(
        tokens=np.array(row["tokens"], np.int32),
        loss_mask=np.array(row["loss_mask"], np.uint8),
        behave_logprobs=np.array(row["behave_logprobs"], np.float32),
        versions=np.array(row["versions"], np.int32),
        reward=row["reward"],
        truncated=row["truncated"],
        episode=row["episode"],
        token_rewards=None if rewards is None else np.array(rewards, np.float32),
        reward_parts=dict(row["reward_parts"] or {}),
        metrics=dict(row["metrics"] or {}),
        token_columns={name: np.array(own, np.float32) for name, own in dict(row.get("token_columns") or {}).items()},
        pictures=_placed(row, pictures),
        group=row.get("group") or "",
    )


def _row(
    trajectory: Trajectory,
    number: int,
    sample: Sample,
    step: int,
    decode: Callable[[Sequence[int]], str],
    scores: Scores,
) -> Row:
    tokens, mask = sample.tokens.tolist(), sample.loss_mask.astype(bool)
    generated = sample.versions[mask]
    segments = _segments(tokens, mask, sample, decode)
    return {
        "step": step,
        "rollout": trajectory.rollout_id,
        "prompt": trajectory.prompt_id,
        "order": trajectory.order,
        "sample": number,
        "episode": sample.episode,
        "group": sample.group,
        "reward": sample.reward,
        "total_reward": sample.total_reward,
        "reward_parts": dict(sample.reward_parts),
        "metrics": dict(sample.metrics),
        "token_columns": {name: own.tolist() for name, own in sample.token_columns.items()},
        "rollout_metrics": dict(trajectory.metrics),
        "truncated": bool(sample.truncated),
        "staleness": step - 1 - int(generated.min()) if step and len(generated) else None,
        "text": decode(tokens) if not sample.pictures else "".join(segment["text"] for segment in segments),
        "segments": segments,
        "tokens": tokens,
        "loss_mask": sample.loss_mask.tolist(),
        "versions": sample.versions.tolist(),
        "behave_logprobs": sample.behave_logprobs.tolist(),
        "token_rewards": None if sample.token_rewards is None else sample.token_rewards.tolist(),
        **{name: scores[name].tolist() if name in scores else None for name in TOKEN_SCORES},
    }


def _segments(
    tokens: Sequence[int],
    mask: NDArray[np.bool_],
    sample: Sample,
    decode: Callable[[Sequence[int]], str],
) -> list[dict[str, Any]]:
    """Cut the sample where generated text begins or ends, where the version changes, and around pictures.

    The text of a picture is its name.
    """
    versions = sample.versions
    changes = np.flatnonzero((mask[1:] != mask[:-1]) | (mask[1:] & (versions[1:] != versions[:-1]))) + 1
    names = {placed.position: str(placed.picture) for placed in sample.pictures}
    around = [place for placed in sample.pictures for place in (placed.position, placed.end)]
    bounds = sorted({0, *changes.tolist(), *around, len(tokens)})
    return [
        {
            "generated": bool(mask[start]),
            "version": int(versions[start]) if mask[start] else None,
            "start": start,
            "stop": stop,
            "text": names[start] if start in names else decode(tokens[start:stop]),
        }
        for start, stop in pairwise(bounds)
    ]
