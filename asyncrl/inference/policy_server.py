"""Servers of other policies than the run's own."""

from __future__ import annotations

from pathlib import Path

from asyncrl.comm import names
from asyncrl.inference.process import EngineHost, GenerationServer
from asyncrl.runtime.process.worker import WorkerSpec


class PolicyServer(GenerationServer):
    """A server of one of `policies`: a further trained policy, a fixed model, or older versions.

    It begins with the folder `path`, or with the run's initial model. The GserverManager drains a server of older
    versions before each update, so an answer is of one version. A server of a trained policy is updated like the run's
    own. A server at `url` is not the run's: nothing is loaded there, and it counts as version 0.
    """

    _scratch = "policy"

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        policy = self.config.policy_of_server[self.index]
        if policy.path is not None:
            self.config.model.path = str(Path(policy.path).expanduser())
        self.config.moe.replay_routing = False  # its tokens are not trained
        self._trained, self._url = policy.trained, policy.url

    _is_colocated = False

    @property
    def _key(self) -> str:
        return f"{names.POLICY_SERVERS}/{self.index}"

    def _make_host(self) -> EngineHost:
        if self._url is None:
            return super()._make_host()
        return self._adopted(self._url, None)

    async def _check(self, url: str) -> None:
        """Check a trained policy only: no answer of the others spans a weight update. All of them read text."""
        if self._trained:
            await super()._check(url)
