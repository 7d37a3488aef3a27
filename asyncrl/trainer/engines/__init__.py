"""Training engines: `trainer.engine`. Importing this loads no torch.

An engine is a file or a folder here with a loader, and one line of `ENGINES`; `base` has the interface.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Engine:
    """A way to place a role's weights, gradients and optimizer on the ranks.

    Attributes:
        loader: import path of its `EngineLoader`; imported by the ranks that use it.
        in_parts: True if layouts may cut the model, so that a rank has a part of it; False if each rank has the whole
            model.
    """

    loader: str
    in_parts: bool


ENGINES = {
    "flat": Engine(f"{__name__}.flat:FlatLoader", in_parts=False),
    "sharded": Engine(f"{__name__}.sharded.loader:ShardedLoader", in_parts=True),
}
"""Engines by the setting's value. `auto` chooses the first one that can train the run's layout."""

AUTO = "auto"
