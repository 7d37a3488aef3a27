"""Checks of the train loop's settings."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from operator import attrgetter

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.import_paths import path_problems
from asyncrl.config.setting import ConfigError, did_you_mean
from asyncrl.config.variants import evaluation_sets
from asyncrl.master.evaluations import evaluation_metrics
from asyncrl.master.graph import GraphError
from asyncrl.master.settings import OnStale
from asyncrl.trainer.parallel.placement import placement, worker_grid


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: `setting=value: what is wrong; what to do`."""
    batch, minibatches = config.train_batch_size, config.trainer.ppo_minibatches
    if batch % minibatches:
        below, above = batch - batch % minibatches, batch + minibatches - batch % minibatches
        near = " or ".join(str(size) for size in (below, above) if size)
        wrong = f"not divisible by trainer.ppo_minibatches={minibatches}; use {near}, or fewer minibatches"
        yield f"train_batch_size={batch}: {wrong}"
    try:
        ranks, critic = worker_grid(config).data, _critic(config)
    except ConfigError:
        return  # the trainer's checks report it
    yield from _too_many_data_ranks(config, "trainer.parallel", ranks)
    if critic is not None and critic != ranks:
        yield from _too_many_data_ranks(config, "algorithm.critic.parallel", critic)
    held, in_flight = config.trainer.buffer_capacity * ranks, (config.max_head_offpolicyness + 1) * batch
    if held < in_flight:
        yield (
            f"trainer.buffer_capacity={config.trainer.buffer_capacity}: {ranks} rank(s) hold {held} rollouts, fewer "
            f"than the (max_head_offpolicyness + 1) * train_batch_size = {in_flight} that may be under way; use "
            f"{-(-in_flight // ranks)} or more"
        )
    yield from _keep_best(config)
    order = config.buffer.order
    if order.path:
        yield from path_problems("buffer.order", order.path)
    elif order.args:
        yield f"buffer.order.args={order.args}: there is no function to take them; give buffer.order.path"
    if config.group_size < config.algorithm.least_episodes:
        yield (
            f"group_size=1: algorithm.advantage.name={config.algorithm.advantage.name!r} compares the episodes of a "
            "group, and one has nothing to be compared with; use group_size=2 or more, or another advantage"
        )
    discount = config.algorithm.advantage.params.get("turn_discount")
    if discount is not None and config.on_stale == OnStale.mask:
        yield (
            f"algorithm.advantage.params.turn_discount={discount}: turns are compared by their number, which is lost "
            "where on_stale=mask takes a turn's tokens away; use on_stale=drop or wait"
        )
    for number, choice in enumerate(config.rollout.filters if discount is not None else ()):
        if choice.name == "zero_variance" and not choice.params.get("turns"):
            yield (
                f"rollout.filters[{number}].params={choice.params}: with "
                f"algorithm.advantage.params.turn_discount={discount} turns are compared, and zero_variance would drop "
                "groups whose turns differ and whose sums are equal; set params={turns: true}"
            )


def _critic(config: ExperimentConfig) -> int | None:
    """Return the critic's data-parallel ranks; None if there is no critic, or the graph is invalid."""
    try:
        grids = placement(config).grids
    except GraphError:
        return None  # the launcher reports it
    return grids["critic"].data if "critic" in grids else None


def _too_many_data_ranks(config: ExperimentConfig, name: str, ranks: int) -> Iterator[str]:
    """Yield an error if a data-parallel rank that trains would have no sample of some minibatch."""
    minibatches = config.trainer.ppo_minibatches
    minibatch = config.train_batch_size // minibatches
    if 0 < minibatch < ranks:  # none at all: the batch is not divisible
        yield (
            f"{name}={str(attrgetter(name)(config))!r}: a minibatch has {minibatch} rollouts, fewer than the {ranks} "
            f"data-parallel ranks; use at most d{minibatch}, or a train_batch_size of at least {ranks * minibatches}"
        )


def _keep_best(config: ExperimentConfig) -> Iterator[str]:
    metric, checkpoints = config.checkpoint.keep_best, config.checkpoint.interval
    if metric is None:
        return
    measured = {
        f"eval/{each.name}/{name}": each
        for each in evaluation_sets(config)
        for name in evaluation_metrics(each.n_samples)
    }
    if metric not in measured:
        hint = did_you_mean(metric, list(measured)) or ";"
        yield f"checkpoint.keep_best={metric!r}: no evaluation measures it{hint} use one of {', '.join(measured)}"
        return
    each = measured[metric]
    if not each.interval or not checkpoints or lcm(each.interval, checkpoints) > config.total_train_steps:
        yield (
            f"checkpoint.keep_best={metric!r}: no step has both an evaluation ({each.group}.interval={each.interval}) "
            f"and a checkpoint (checkpoint.interval={checkpoints}) within "
            f"total_train_steps={config.total_train_steps}; make one interval a multiple of the other"
        )
