"""Optional: win rates against the members of prioritised pools (`policies`).

An agent gives the samples of an episode the metric `won/<pool>`: 1 if the policy won against that opponent, 0 if it
lost, or a number between. A trained rollout counts for the member that answered in all of it; one whose episodes met
two members counts for none. The rate of a member is (1 + won) / (2 + rollouts), so 1/2 before the first.

The rates that a choice depends on are those after the step that made its version. They are announced with the version
and are part of every checkpoint, so a restarted manager and a resumed run choose as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from asyncrl.api.trajectory import POLICY_SERVERS, WON
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.settings import VersionPoolConfig
from asyncrl.trainer.messages import RolloutRecord


class WinRates:
    """Pure: takes trained rollouts and returns rates.

    Args:
        pools: prioritised pools, by name.
    """

    def __init__(self, pools: Mapping[str, VersionPoolConfig]) -> None:
        self._pools = pools
        self._games: dict[str, dict[int, tuple[float, int]]] = {name: {} for name in pools}
        """By pool and member: the sum of reports, and the number of rollouts."""
        self._rates: dict[int, dict[str, dict[int, float]]] = {}
        """By version at which choices are made."""

    @classmethod
    def of_run(cls, config: ExperimentConfig) -> WinRates:
        """Build the rates of a run's prioritised pools."""
        return cls({policy.name: policy.versions for policy in config.policies if policy.is_prioritised})

    def trained(self, version: int, records: Iterable[RolloutRecord]) -> None:
        """Take the rollouts of the step that made `version`."""
        for record in records:
            for name, games in self._games.items():
                won = record.metrics.get(f"agent/{WON}{name}")
                met = {record.metrics.get(f"{POLICY_SERVERS}{name}/{which}_version") for which in ("oldest", "newest")}
                if won is not None and len(met) == 1 and (member := met.pop()) is not None:
                    total, count = games.get(int(member), (0.0, 0))
                    games[int(member)] = (total + min(1.0, max(0.0, won)), count + 1)
        for name, pool in self._pools.items():
            members = {*pool.needed(version), 0}
            self._games[name] = {each: games for each, games in self._games[name].items() if each in members}
        self._rates[version] = {
            name: {member: (1.0 + won) / (2.0 + count) for member, (won, count) in games.items()}
            for name, games in self._games.items()
        }
        longest = max((pool.hold for pool in self._pools.values()), default=0)
        self._rates = {made: rates for made, rates in self._rates.items() if made >= version - longest - 1}

    def at(self, version: int) -> dict[str, dict[int, float]]:
        """Return the rates by which servers choose once `version` is published: those when the choice was made."""
        return {name: self._rates.get(pool.chosen_at(version), {}).get(name, {}) for name, pool in self._pools.items()}

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values, for a checkpoint."""
        games = {name: [[member, *each] for member, each in of.items()] for name, of in self._games.items()}
        rates = [
            [version, {name: [*map(list, of.items())] for name, of in each.items()}]
            for version, each in self._rates.items()
        ]
        return {"games": games, "rates": rates}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the return value of `state`; None, of a checkpoint without it: from no games."""
        games = (state or {}).get("games", {})
        self._games = {name: {each[0]: (each[1], each[2]) for each in games.get(name, ())} for name in self._pools}
        self._rates = {
            version: {name: {member: rate for member, rate in of} for name, of in each.items() if name in self._pools}
            for version, each in (state or {}).get("rates", ())
        }
