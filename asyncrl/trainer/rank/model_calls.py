"""Model functions on a rank: as calls of a step's graph, and ahead of a step on rollouts that wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.trained_policies import config_of_policy, policy_and_role
from asyncrl.master.graph.call_graph import Graph
from asyncrl.trainer.batches.exchange_trajectories import hand_down
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.functions.model_functions import CallContext, StatValues, find_function, run_call
from asyncrl.trainer.messages import RunCall, ScoreAhead
from asyncrl.trainer.rank.measures import StepMeasures
from asyncrl.trainer.rank.training_rank import TrainingRank
from asyncrl.trainer.trajectories.inbox import Inbox
from asyncrl.trainer.trajectories.scored import detach, scores_of


class ModelCalls:
    """Runs model functions, each with the settings, engines and ranks of its call's policy and role.

    Raises:
        PluginError: a call of `graph` names no model function.
    """

    def __init__(self, config: ExperimentConfig, graph: Graph, rank: TrainingRank) -> None:
        self._config, self._rank = config, rank
        self._functions = {call.function: find_function(call.function) for call in graph.calls}
        self._of_policies = {name: config_of_policy(config, name) for name in ("", *config.trained_policies)}

    def run(self, call: RunCall, batch: StepBatch) -> StatValues:
        """Run `call` on `batch`; return its statistics."""
        policy = call.policy
        settings = policy_and_role(self._config, call.role)[0]  # "" for the run's own critic, which policies may share
        context = CallContext(
            name=call.name,
            role=policy_and_role(self._config, call.role)[1],
            reads=call.reads,
            writes=call.writes,
            args=call.args,
            config=self._of_policies[settings],
            engines=self._rank.engines_of(policy),
            ranks=self._rank.world.place(call.role).data,
            state=self._rank.state_of(policy),
            roles=self._rank.roles_of(policy),
        )
        return run_call(self._functions[call.function], context, batch)


class RolloutScorer:
    """Scores rollouts by frozen models while they wait for their step.

    Args:
        columns: the user's columns, which every batch has.
        inbox: holds the rollouts, and then their scores.
        device: device of the batches.
    """

    def __init__(
        self,
        rank: TrainingRank,
        calls: ModelCalls,
        inbox: Inbox,
        measures: StepMeasures,
        columns: Sequence[str],
        device: torch.device,
    ) -> None:
        self._world = rank.world
        self._calls, self._inbox, self._measures = calls, inbox, measures
        self._columns, self._device = columns, device

    def score(self, request: ScoreAhead) -> None:
        """Score what the head of each copy received, and keep the scores there. Called by all ranks of the actor."""
        place = self._world.place(ACTOR)
        held = self._inbox.get(request.rollout_ids[place.coordinates.data]) if place.copy.leads else {}
        trajectories, _ = detach(hand_down(list(held.values()), place.copy))
        batch = build_step_batch(
            trajectories,
            [0] * len(trajectories),
            version=request.version,
            num_minibatches=1,
            own=self._columns,
            device=self._device,
        )
        with self._measures.computing():
            for call in request.calls:
                self._calls.run(call, batch)
            scores = scores_of(batch, [key for call in request.calls for key in call.writes])
        if place.copy.leads:
            self._inbox.keep_scores(scores)
