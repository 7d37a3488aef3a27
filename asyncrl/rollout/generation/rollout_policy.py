"""The policies as the agent of one rollout calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from asyncrl.api import GenerationRequest, GenerationResult, Sample
from asyncrl.manager.messages import Route
from asyncrl.rollout.generation.generated_tokens import GeneratedTokens
from asyncrl.rollout.generation.rollout_client import RolloutClient
from asyncrl.rollout.user_code_pool.timing import Activity, timed


@dataclass(slots=True)
class RolloutPolicy:
    """The run's own policy and the others of `policies`, for one rollout. It records which answers the rollout got.

    Attributes:
        client: generates the answers.
        rollout_id: the rollout.
        route: server chosen at admission; the first request goes there.
        trained: the further trained policies; all others are opponents.
        failures: errors of requests.
    """

    client: RolloutClient
    rollout_id: str
    route: Route | None
    trained: Collection[str] = ()
    failures: list[Exception] = field(default_factory=list)
    _met: dict[str, Counter[int]] = field(default_factory=dict)
    """Tokens of the opponents' answers, by policy and version."""
    _generated: GeneratedTokens = field(init=False)

    def __post_init__(self) -> None:
        self._generated = GeneratedTokens(self.trained)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Generate answers of the policy that `request` names."""
        route = None
        if not request.policy:
            route, self.route = self.route, None
        try:
            with timed(Activity.generate):
                result = await self.client.generate(request, self.rollout_id, route=route)
        except Exception as error:
            self.failures.append(error)
            raise
        if request.policy and request.policy not in self.trained:
            versions = self._met.setdefault(request.policy, Counter())
            versions.update(version for completion in result.completions for version in completion.versions)
        self._generated.answered(request.policy, result.completions)
        return result

    def check(self, samples: Sequence[Sample]) -> None:
        """Check that the generated tokens of each policy's samples are its own.

        Raises:
            EpisodeError: some are not.
        """
        self._generated.check(samples)

    def metrics(self) -> dict[str, float]:
        """Return the number of tokens that each trained policy generated, and the versions of the opponents.

        Versions are the oldest, the newest and the mean by tokens.
        """
        found: dict[str, float] = {}
        for policy, versions in self._met.items():
            if tokens := versions.total():
                mean = sum(version * count for version, count in versions.items()) / tokens
                found[f"opponent/{policy}/version"] = mean
                found[f"opponent/{policy}/oldest_version"] = float(min(versions))
                found[f"opponent/{policy}/newest_version"] = float(max(versions))
        return found | self._generated.metrics()
