"""List the checkpoints in a folder and find the newest complete one. Torch-free.

    <root>/v<N>/    shard-<rank>-of-<world>.safetensors ... state.json manifest.json

A checkpoint appears at once, by a rename (`atomic_dir`), and its manifest lists every file with its checksum. So each
is complete unless the disk lost data later. A damaged checkpoint is renamed to `v<N>.damaged`, and the run continues
from the previous one: an unusable checkpoint must not count among those that are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from asyncrl.config.run_dir import versions_in
from asyncrl.weights import atomic_dir
from asyncrl.weights.manifest import ManifestError, verify

DAMAGED_SUFFIX = ".damaged"

_log = logging.getLogger(__name__)


def latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint in `root`; None if `root` has no checkpoint. Newer damaged ones are
    renamed.

    Raises:
        ManifestError: all checkpoints are damaged. A run that started over here would lose them.
    """
    newest: ManifestError | None = None
    damaged = []
    for version in reversed(versions_in(root)):
        directory = root / f"v{version}"
        try:
            verify(directory)
        except ManifestError as error:
            _log.warning("checkpoint %s cannot be used, looking for an older one: %s", directory, error)
            newest = newest or error
            damaged.append(directory)
        else:
            for unusable in damaged:
                atomic_dir.remove(_set_aside(unusable))  # left by an earlier call
                atomic_dir.rename(unusable, _set_aside(unusable))
            return directory
    if newest is not None:
        raise ManifestError(
            f"no checkpoint in {root} can be used, the newest because {newest}; set resume=restart to start over"
        ) from newest
    return None


def which_to_keep(
    versions: Collection[int], newest: int, every: int, scores: Mapping[int, float], undecided: Collection[int] = ()
) -> set[int]:
    """Return the versions of the checkpoints to keep.

    Args:
        newest: number of newest checkpoints to keep.
        every: keep versions divisible by this; 0: none.
        scores: by version, higher is better. The best version that still has a checkpoint is kept; the newest if
            several are equal.
        undecided: versions without a score yet, which are kept.
    """
    ordered = sorted(versions)
    kept = set(ordered[-newest:]) | {version for version in ordered if every and version % every == 0}
    scored = [version for version in ordered if version in scores]
    if scored:
        kept.add(max(scored, key=lambda version: (scores[version], version)))
    return kept | {version for version in ordered if version in undecided}


def prune(root: Path, keep: int, protected: Collection[int] = ()) -> list[int]:
    """Delete all but the newest `keep` complete checkpoints and the `protected` ones, and leftovers of killed writers.

    A checkpoint counts as complete if all its files have their sizes: reading all files at each save would double its
    cost. The caller has just written a checkpoint, so the newest one is complete to the last byte.

    Returns:
        The deleted versions, ascending.

    Raises:
        ValueError: `keep` is not positive.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: a run needs its newest checkpoint; set checkpoint.keep to at least 1")
    atomic_dir.clear_leftovers(root)
    versions = versions_in(root)
    whole = [version for version in versions if _has_all_files(root / f"v{version}")]
    if len(whole) < keep:
        return []
    oldest = whole[-keep]
    for directory in root.glob(f"v*{DAMAGED_SUFFIX}"):
        if int(directory.name.removeprefix("v").removesuffix(DAMAGED_SUFFIX)) < oldest:
            atomic_dir.remove(directory)
    old = [version for version in versions if version < oldest and version not in protected]
    for version in old:
        atomic_dir.remove(root / f"v{version}")
    return old


def _has_all_files(directory: Path) -> bool:
    try:
        verify(directory, checksums=False)
    except ManifestError as error:
        _log.warning("checkpoint %s does not count among those that are kept: %s", directory, error)
        return False
    return True


def _set_aside(directory: Path) -> Path:
    return directory.with_name(directory.name + DAMAGED_SUFFIX)
