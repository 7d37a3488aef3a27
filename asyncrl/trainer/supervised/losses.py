"""The losses of supervised training by name. Torch-free, so that settings are checked with it."""

from __future__ import annotations

from asyncrl.config.plugin_code import catalog
from asyncrl.config.plugin_code.import_paths import PluginError
from asyncrl.config.setting import ChoiceConfig
from asyncrl.config.suggestions import did_you_mean
from asyncrl.trainer.supervised.settings import CROSS_ENTROPY

REWARD_LOSS, PAIR_LOSS, LABEL_LOSS = "reward_loss", "pair_loss", "label_loss"
KINDS = (REWARD_LOSS, PAIR_LOSS, LABEL_LOSS)


def loss_kind(loss: ChoiceConfig) -> str | None:
    """Return the kind of a loss on judged answers, one of `KINDS`; None for the loss on demonstrations.

    Raises:
        PluginError: there is no such loss.
    """
    if loss.name == CROSS_ENTROPY:
        return None
    kinds = {name: kind for kind in KINDS for name in catalog.known(kind)}
    if loss.name not in kinds:
        raise PluginError(
            f"unknown loss {loss.name!r}{did_you_mean(loss.name, (CROSS_ENTROPY, *kinds))}; known: "
            f"{', '.join((CROSS_ENTROPY, *kinds))}"
        )
    return kinds[loss.name]
