"""Which checkpoints there are, and which is the newest whole one. Torch-free.

    <root>/v<N>/    shard-<rank>-of-<world>.safetensors ... state.json manifest.json

A checkpoint appears at once, by a rename (`atomic_dir`), and its manifest lists every file with its checksum. So one
that is there is whole, unless the disk lost something later; such a one is passed over for the one before it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from asyncrl.runtime.run_dir import versions_in
from asyncrl.weights import atomic_dir
from asyncrl.weights.manifest import ManifestError, verify

_log = logging.getLogger(__name__)


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint in `root`; None if there is none at all. A damaged one is logged and passed over.

    Raises:
        ManifestError: there are some, but none can be used: whoever began anew here would lose them.
    """
    newest: ManifestError | None = None
    for version in reversed(versions_in(root)):
        directory = root / f"v{version}"
        try:
            verify(directory)
        except ManifestError as error:
            _log.warning("checkpoint %s cannot be used, looking for an older one: %s", directory, error)
            newest = newest or error
        else:
            return directory
    if newest is not None:
        raise ManifestError(
            f"no checkpoint in {root} can be used, the newest because {newest}; set resume=restart to begin anew"
        ) from newest
    return None


def which_to_keep(
    versions: Collection[int], newest: int, every: int, scores: Mapping[int, float], undecided: Collection[int] = ()
) -> set[int]:
    """Which of the checkpoints of `versions` stay.

    Args:
        newest: so many of the newest do.
        every: those of every so manieth version do; 0: none.
        scores: by version, higher is better; the best that still has a checkpoint stays, of equal ones the newest.
        undecided: versions that may turn out to be the best, and stay until that is known.
    """
    ordered = sorted(versions)
    kept = set(ordered[-newest:]) | {version for version in ordered if every and version % every == 0}
    scored = [version for version in ordered if version in scores]
    if scored:
        kept.add(max(scored, key=lambda version: (scores[version], version)))
    return kept | {version for version in ordered if version in undecided}


def prune(root: Path, keep: int, protected: Collection[int] = ()) -> list[int]:
    """Delete all but the newest `keep` checkpoints and those `protected`, and what killed writers left; returns the
    deleted versions.

    Raises:
        ValueError: `keep` is not positive.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: a run needs its newest checkpoint; set checkpoint.keep to at least 1")
    atomic_dir.clear_leftovers(root)
    old = [version for version in versions_in(root)[:-keep] if version not in protected]
    for version in old:
        atomic_dir.remove(root / f"v{version}")
    return old
