"""Checks of the settings of metrics and display."""

from __future__ import annotations

import contextlib
import importlib.util
import netrc
import os
from collections.abc import Iterator
from urllib.parse import urlsplit

from asyncrl.config.experiment import ExperimentConfig

_HOST = "api.wandb.ai"
"""Host under which `wandb login` has kept keys for years, whatever the present address is."""


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    if (config.samples.replay or config.samples.only) and importlib.util.find_spec("pyarrow") is None:
        yield "samples: pyarrow is not installed, which reads and writes kept samples; install the `data` extra"
    for name, every in (("every", config.samples.every), ("eval_every", config.samples.eval_every)):
        if every and importlib.util.find_spec("pyarrow") is None:
            yield f"samples.{name}={every}: pyarrow is not installed; install the `data` extra, or set it to 0"
    if (config.samples.replay or config.samples.only) and config.eval.interval:
        yield (
            f"eval.interval={config.eval.interval}: what only replays or only keeps rollouts evaluates nothing; leave "
            "it 0"
        )
    if config.samples.replay and config.samples.only:
        yield "samples.only=true: samples.replay is set too, and generates nothing; leave one of them"
    project = config.logging.wandb_project
    if project and importlib.util.find_spec("wandb") is None:
        yield (
            f"logging.wandb_project={project!r}: wandb is not installed; install the `tracking` extra, or leave "
            "it empty"
        )
    elif project and not config.system.hosts and not _can_track():
        yield (
            f"logging.wandb_project={project!r}: there is no API key; run `wandb login`, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline and upload later"
        )


def _can_track() -> bool:
    """Return False if Weights & Biases is to send metrics and has no key of this user."""
    import wandb

    settings = wandb.setup().settings
    wandb.teardown()  # ends its helper process, which the launcher has no use for
    if settings.mode not in (None, "online", "shared") or settings.api_key or settings.identity_token_file:
        return True
    for name in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if (
                name
                and {urlsplit(settings.base_url).netloc, _HOST} & netrc.netrc(os.path.expanduser(name)).hosts.keys()
            ):
                return True
    return False
