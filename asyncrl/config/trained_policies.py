"""Further trained policies: their settings, their roles in the trainer, and the assignment of samples to policies.

The run's own policy has the name "" and the roles `actor`, `critic`, `ref` and so on. Those of a further policy `judge`
are `judge`, for its actor, `judge/ref` and so on, so its weights are in `weights/judge`. A sample belongs
to the policy named by the role of its comparison group (`asyncrl.api.trajectory.role_of`), set by the policy's client.
"""

from __future__ import annotations

from dataclasses import replace

from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.values import changed
from asyncrl.trainer.settings import ReferenceMode

SEPARATOR = "/"
CRITIC, REFERENCE = "critic", "ref"


def role_of_policy(policy: str, role: str) -> str:
    """Return the name in the run of a policy's `role`."""
    if not policy:
        return role
    return policy if role == ACTOR else f"{policy}{SEPARATOR}{role}"


def policy_and_role(config: ExperimentConfig, role: str) -> tuple[str, str]:
    """Return the policy that `role` of the run belongs to, and its role there: `judge` and `ref` for `judge/ref`."""
    policy, _, own = role.partition(SEPARATOR)
    if policy not in config.trained_policies:
        return "", role
    return policy, own or ACTOR


def is_changing(config: ExperimentConfig, role: str) -> bool:
    """True if the weights of `role` change in the run, so that checkpoints have them."""
    policy, own = policy_and_role(config, role)
    follows = config_of_policy(config, policy).algorithm.reference.mode == ReferenceMode.ema
    return own in (ACTOR, CRITIC) or (own == REFERENCE and follows)


def config_of_policy(config: ExperimentConfig, name: str) -> ExperimentConfig:
    """Return the settings of a run that trains only the policy `name`: this run's, changed by the policy's own.

    Raises:
        ConfigError: a setting of the policy does not exist, or has another type.
    """
    if not name:
        return config
    policy = next(policy for policy in config.policies if policy.name == name)
    algorithm = changed(f"policies: {name!r}: algorithm", config.algorithm, policy.algorithm)
    return replace(
        config,
        policies=[],
        model=replace(config.model, path=policy.path or config.model.path),
        trainer=replace(
            config.trainer,
            parallel=policy.parallel or config.trainer.parallel,
            train_every=policy.train_every,
            train_offset=policy.train_offset,
        ),
        optimizer=changed(f"policies: {name!r}: optimizer", config.optimizer, policy.optimizer),
        algorithm=replace(algorithm, critic=config.algorithm.critic) if policy.shared_critic else algorithm,
    )
