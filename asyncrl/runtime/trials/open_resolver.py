"""The name resolution of a trial, opened as its settings say."""

from __future__ import annotations

from pathlib import Path

from asyncrl.comm.name_resolve import NameBackend, NameResolver, NameResolveUnavailable, make_resolver
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import NAMES_DIR
from asyncrl.runtime.settings import etcd_access


def open_resolver(config: ExperimentConfig, run_dir: Path, *, patience_s: float | None = None) -> NameResolver:
    """Open the name resolution of the run in `run_dir`.

    Args:
        patience_s: longest outage in seconds; None: `system.name_resolve_timeout_s`.
    """
    system, trial = config.system, f"{config.experiment_name}/{config.trial_name}"
    patience_s = system.name_resolve_timeout_s if patience_s is None else patience_s
    root, etcd = str(run_dir / NAMES_DIR), None
    if system.name_resolve == NameBackend.etcd3:
        root, etcd = f"/asyncrl/{trial}", etcd_access(system)
    elif system.name_resolve_root:  # which other trials may share
        root = str(Path(system.name_resolve_root).expanduser() / trial)
    return make_resolver(system.name_resolve, root, etcd=etcd, patience_s=patience_s)


def describe_outage(error: NameResolveUnavailable, config: ExperimentConfig) -> str:
    """Return the message for an outage of name resolution that lasted too long."""
    limit_s = config.system.name_resolve_timeout_s
    return f"{error}; the run ends, as system.name_resolve_timeout_s={limit_s:g} allows no longer outage"
