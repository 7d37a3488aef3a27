"""What a back end of the GenerationServers can do: the class that each engine fills in.

All others ask `generation.engine` and know no engine by its name. To add one, write its folder (`backend`, `checks`,
`host`) and its line in `settings.BACKENDS`; for a program of its own also its `ProgramConfig`, as a field of this name
in `GenerationConfig`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.config.setting import setting


@dataclass
class ProgramConfig:
    """Servers that are a program of their own."""

    python: str = setting("", "interpreter with the program installed; empty: this one")
    urls: list[str] = setting(help="URLs of running servers, used in place of `servers`, never stopped", factory=list)
    args: dict[str, Any] = setting(help="flags of the program", factory=dict)
    env: dict[str, str] = setting(help="environment variables of the servers that the run starts", factory=dict)
    tensor_parallel: int = setting(1, "GPUs of each server, over which each layer is cut", unit="GPUs", minimum=1)


@dataclass(frozen=True, slots=True)
class ServerShape:
    """Ranks of one server along each axis.

    With `shared_attention` the data axis lies within the tensor axis and adds no ranks. `settings` are those that say
    so, for messages.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    shared_attention: bool = False
    settings: str = ""

    @property
    def gpus(self) -> int:
        """Number of GPUs of the server: one per rank."""
        return self.tensor * self.pipeline * (1 if self.shared_attention else self.data)


class Backend:
    """Capabilities of the servers of these settings. The defaults are those of an engine that can only generate text.

    Attributes:
        name: value of `generation.backend`.
        program: its part of the settings if it is a program of its own; None: torch in the GenerationServer's process.
        label: name in messages.
        host: import path of a function (worker, *, scratch, colocated) that returns the `EngineHost` of a
            GenerationServer that starts its engine; `program_host.ChildHost` is all of it for a program but its
            command.
        checks: function `check(config)` of the settings that concern this engine alone; empty if there is none.
        slow_on_gpus: notice for a run that has its servers on GPUs; empty: none.
        server_check: import path of a function (url, config, security) that checks a server before it gets requests;
            empty: the engine itself refuses what it cannot do.
        package: the Python package that the interpreter of `program` has to have; `asyncrl install` has scripts of this
            name. Empty: none is asked for.
        memory_flag: its flag for the share of a GPU's free memory that a server takes; empty: `fixed_cache`.
        memory_is_counted: what a server holds is known before it starts: weights, packed copies of them, and a cache
            that is laid out anew layer by layer (`asyncrl.launch.previews`).
        keeps_pictures: pictures are sent once and then named; False: each is sent with the request that shows it.
        pause_ends_requests: a pause that aborts ends running requests at once; False: in a second or so, and an abort
            of them is faster.
        same_arithmetic: it rounds as training ranks of the same type do.
        tells_experts: answers tell which experts each token was sent to.
        loads_adapters: a version may be LoRA adapters alone.
        loads_quantised: it serves folders of quantised weights as they are.
        weight_transports: values of `manager.weight_transport` by which it takes weights.
        verifies_files: it verifies the checksums of the weights that it reads.
    """

    label: str
    host: str
    checks = slow_on_gpus = server_check = package = memory_flag = ""
    memory_is_counted = keeps_pictures = pause_ends_requests = False
    same_arithmetic = tells_experts = loads_adapters = loads_quantised = verifies_files = False
    weight_transports: Sequence[str] = ("disk",)

    def __init__(self, name: str, program: ProgramConfig | None) -> None:
        self.name, self.program = name, program

    def named(self, setting: str) -> str:
        """Return the full name of a setting of `program`, for messages: `generation.sglang.urls`."""
        return f"generation.{self.name}.{setting}"

    @property
    def urls(self) -> Sequence[str]:
        """Servers that others started and the run adopts; empty if the run starts its own."""
        return () if self.program is None else self.program.urls

    @property
    def flags(self) -> dict[str, Any]:
        """`args` of `program` by the engine's own names, whichever way they are spelled."""
        args = {} if self.program is None else self.program.args
        return {key.lstrip("-").replace("-", "_"): value for key, value in args.items()}

    @property
    def fixed_cache(self) -> bool:
        """True if `generation.max_total_tokens` bounds what a server holds, whether it is set or not."""
        return not self.memory_flag

    @property
    def memory_setting(self) -> str:
        """The setting that bounds the memory of a server."""
        if self.fixed_cache:
            return "generation.max_total_tokens"
        return self.named(f"args.{self.memory_flag}")

    @property
    def memory_share(self) -> float | None:
        """The share of a GPU's free memory that a server may take; None: the engine's default."""
        share: float | None = self.flags.get(self.memory_flag)
        return share

    @property
    def shape(self) -> ServerShape:
        """The ranks of each server that is started.

        Raises:
            ValueError: a flag does not fit; the message names it.
        """
        tensor = 1 if self.program is None else self.program.tensor_parallel
        return ServerShape(tensor, settings=self.named(f"tensor_parallel={tensor}"))

    @property
    def quantised(self) -> str:
        """The setting by which the servers quantise their weights; empty if they do not, or were adopted."""
        return ""

    @property
    def finds_stop_strings(self) -> bool:
        """True if the servers have tokenizers to find stop strings with."""
        return False

    @property
    def wants_prefix_first(self) -> bool:
        """True if the servers share the common prefix of one batch's requests only after an earlier request had it."""
        return False

    def takes_pictures(self, weight_transport: str, model_type: str) -> bool:
        """Return whether the servers take the pictures of models of transformers' type `model_type`."""
        return False
