"""Checks of a run whose sessions are opened by programs outside (`asyncrl.rollout.online.agent:OnlineAgent`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from asyncrl.api.reward import RunIn
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.variants import evaluation_sets, with_code_of
from asyncrl.rollout.online.sessions import Sessions
from asyncrl.rollout.settings import ONLINE_AGENT, Pacing

ONLINE_ROWS: Final = "asyncrl.plugins.datasets.online:OnlineRows"


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each setting that an online run cannot have: `setting=value: what is wrong; what to
    do`.
    """
    data, rollout, agent = config.dataset, config.rollout, config.agent
    try:
        Sessions(**agent.args)
    except (TypeError, ValueError) as error:
        yield f"agent.args={agent.args}: {error}; {ONLINE_AGENT} takes lease_s, hold_s and wait_s"
    if data.sources or data.path != ONLINE_ROWS:
        yield (
            f"dataset.path={data.path!r}: clients bring the prompts of an online run, and no row of a data set would "
            f"be played; use {ONLINE_ROWS}, and no dataset.sources"
        )
    why = "the prompt of an online session is its client's, and comes once"
    if data.curriculum.is_on:
        yield f"dataset.curriculum: {why}; leave it out"
    if config.total_epochs is not None:
        yield f"total_epochs={config.total_epochs:g}: {why}; set total_train_steps"
    if rollout.filters and rollout.filter_tries > 1:
        yield f"rollout.filter_tries={rollout.filter_tries}: {why}; set it to 1"
    if rollout.pacing != Pacing.eager:
        yield f"rollout.pacing={rollout.pacing}: clients decide when online sessions begin; use {Pacing.eager}"
    if config.algorithm.advantage.name == "remax":
        yield "algorithm.advantage.name=remax: nobody plays the greedy baseline of an online session; use another"
    if config.policies:
        yield "policies: an online session has the run's own policy alone; leave them out"
    if of_row := [name for name in rollout.columns if name.startswith("row/")]:
        yield f"rollout.columns={of_row}: an online session has no row; report metrics, and name them agent/<name>"
    if agent.run_in != RunIn.auto:
        yield f"agent.run_in={agent.run_in}: {ONLINE_AGENT} has its own place; use auto"
    for name in ("replay", "only"):
        if value := getattr(config.samples, name):
            yield f"samples.{name}={value!r}: an online run trains what its clients play; start it by `train`"
    if config.system.hosts and not config.system.shared_filesystem:
        yield "system.shared_filesystem=false: clients find doors and key in the run's folder, which hosts must share"
    for each in evaluation_sets(config):
        if each.interval and (each.path is None or with_code_of(config, each).agent.path == ONLINE_AGENT):
            yield (
                f"{each.group}.interval={each.interval}: nobody plays the online sessions of an evaluation; give it a "
                "path and an agent of its own, or set the interval to 0"
            )
