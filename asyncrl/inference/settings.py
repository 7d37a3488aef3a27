"""Settings of the GenerationServers, and the back ends: what each engine can do, in one table.

All others ask `generation.engine` and know no engine by its name. To add one, write its folder, its class here, and its
name in `GenerationBackend` and `BACKENDS`; for a program of its own also its `ProgramConfig`, as a field of this name
in `GenerationConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, Final

from asyncrl.config.setting import Device, Dtype, setting

NO_GUESTS, ALL_GUESTS = "none", "all"


class GenerationBackend(StrEnum):
    """The engine behind the HTTP contract."""

    embedded = auto()
    """The torch engine in the GenerationServer's own process."""
    sglang = auto()
    """An SGLang server, started as a child or adopted."""


@dataclass
class ProgramConfig:
    """Servers that are a program of their own."""

    python: str = setting("", "interpreter with the program installed; empty: this one")
    urls: list[str] = setting(help="URLs of running servers, used in place of `servers`, never stopped", factory=list)
    args: dict[str, Any] = setting(help="flags of the program", factory=dict)
    env: dict[str, str] = setting(help="environment variables of the servers that the run starts", factory=dict)
    tensor_parallel: int = setting(1, "GPUs of each server, over which each layer is cut", unit="GPUs", minimum=1)


@dataclass
class SGLangConfig(ProgramConfig):
    """SGLang servers."""

    python: str = setting("", "interpreter with sglang installed; empty: this one")
    args: dict[str, Any] = setting(help="flags of sglang.launch_server, e.g. {mem_fraction_static: 0.8}", factory=dict)


@dataclass
class GenerationConfig:
    """GenerationServers."""

    backend: GenerationBackend = setting(
        GenerationBackend.embedded,
        "inference engine of each server: embedded, torch in the server's own process; sglang",
    )
    servers: int = setting(1, "number of GenerationServers, each with a copy of the model", minimum=1)
    guests: str = setting(
        NO_GUESTS,
        "servers on the trainer's own devices, which give their memory back while a step is trained: none, all, or the "
        "number of the last ones",
    )
    device: Device = setting(Device.auto, "cpu, cuda, or auto: cuda if there is a GPU")
    dtype: Dtype = setting(Dtype.auto, "type of weights and KV cache; auto: bfloat16 on GPUs, float32 on CPUs")
    max_running_requests: int = setting(
        0,
        "most sequences decoded together; more wait; 0: 256, and with SGLang on a GPU as many as it finds room for",
        minimum=0,
    )
    max_total_tokens: int = setting(
        0,
        "size of the KV cache; requests beyond it wait; 0: 65536, and with SGLang on a GPU what is left of "
        "mem_fraction_static",
        unit="tokens",
        minimum=0,
    )
    chunked_prefill_size: int = setting(
        512,
        "most tokens of one prompt that are computed between two decode steps, so that a long prompt does not hold up "
        "other samples for its whole length (embedded engine)",
        unit="tokens",
        minimum=16,
    )
    picture_memory: float = setting(
        0.5,
        "host memory for pictures that a server keeps for later requests, as they were sent (SGLang: as its model "
        "reads them); 0.5 holds some 2000 of 448 x 448 as PNG, or 100 as Qwen2-VL reads them",
        unit="GiB",
        minimum=0.0,
    )
    context_length: int = setting(
        0,
        "longest conversation; 0: max_prompt_tokens + max_new_tokens, and for each further turn "
        "(rollout.chat.max_turns, or the agent's own max_turns) max_new_tokens + rollout.chat.feedback_tokens",
        unit="tokens",
        minimum=0,
    )
    start_timeout_s: float = setting(
        300.0,
        "a server that starts may make no progress (use no CPU time, read nothing) for so long; with progress it may "
        "take 15 times as long to become ready",
        unit="s",
        minimum=1.0,
    )
    threads: int = setting(1, "CPU threads of each server", unit="threads", minimum=1)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)

    @property
    def engine(self) -> Backend:
        """The back end with its capabilities."""
        return BACKENDS[self.backend](self)

    @property
    def running_limit(self) -> int:
        """`max_running_requests` where an engine does not find its own."""
        return self.max_running_requests or 256

    @property
    def cache_tokens(self) -> int:
        """`max_total_tokens` where an engine does not find its own."""
        return self.max_total_tokens or 65536

    @property
    def cache_limit(self) -> int | None:
        """Tokens that a server's KV cache holds, if the settings bound them; None if the engine finds its own size."""
        return self.cache_tokens if self.engine.fixed_cache or self.max_total_tokens else None


def guests_of(generation: GenerationConfig) -> range:
    """Return the indices of the servers that take turns with the trainer on its devices: the last ones.

    Raises:
        ValueError: `generation.guests` is neither none, all nor a number of servers; the message says so.
    """
    wanted, servers = generation.guests, len(generation.engine.urls) or generation.servers
    if wanted in (NO_GUESTS, ALL_GUESTS):
        count = servers if wanted == ALL_GUESTS else 0
    elif not wanted.isdecimal() or not 1 <= int(wanted) <= servers:
        raise ValueError(
            f"generation.guests={wanted!r}: none, all, or a number of the {servers} servers (generation.servers); use "
            f"{ALL_GUESTS} or 1 to {servers}"
        )
    else:
        count = int(wanted)
    return range(servers - count, servers)


SGLANG_PICTURES: Final = frozenset({"glm4v", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""`model_type` of the models whose pictures SGLang servers take (`asyncrl/inference/sglang/plugin`)."""


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
        label: name in messages.
        host: import path of a function (worker, *, scratch, guest) that returns the `EngineHost` of a GenerationServer
            that starts its engine; `program_host.ChildHost` is all of it for a program but its command.
        checks: function `check(config)` of the settings that concern this engine alone; empty if there is none.
        slow_on_gpus: remark for a run that has its servers on GPUs; empty: none.
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

    def __init__(self, generation: GenerationConfig) -> None:
        self.generation = generation

    @property
    def program(self) -> ProgramConfig | None:
        """Its part of the settings if it is a program of its own; None: torch in the GenerationServer's process."""
        return None

    def named(self, setting: str) -> str:
        """Return the full name of a setting of `program`, for messages: `generation.sglang.urls`."""
        return f"generation.{self.generation.backend}.{setting}"

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


class Embedded(Backend):
    """The torch engine of this package, in the GenerationServer's own process."""

    label = "the embedded engine"
    host = "asyncrl.inference.embedded.host:make_host"
    slow_on_gpus = (
        "on a GPU it is for tests and small models, as a token costs some thirty operators a layer, each started by "
        "the CPU; use generation.backend=sglang for speed"
    )
    memory_is_counted = keeps_pictures = pause_ends_requests = True
    same_arithmetic = tells_experts = loads_adapters = verifies_files = finds_stop_strings = True

    def takes_pictures(self, weight_transport: str, model_type: str) -> bool:
        return True


class SGLang(Backend):
    """An SGLang server, started as a child or adopted."""

    label = "SGLang"
    host = "asyncrl.inference.sglang.host:SGLangHost.of_worker"
    checks = "asyncrl.inference.sglang.checks:check"
    server_check = "asyncrl.inference.sglang.host:check_server"
    package = "sglang"
    memory_flag = "mem_fraction_static"
    loads_quantised = True
    weight_transports = ("disk", "tensor", "distributed")

    @property
    def program(self) -> SGLangConfig:
        return self.generation.sglang

    @property
    def shape(self) -> ServerShape:
        flags, tensor = self.flags, self.generation.sglang.tensor_parallel

        def size(*names: str) -> int:
            value = next((flags[name] for name in names if flags.get(name) is not None), 1)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"generation.sglang.args.{names[0]}={value!r}: it is a number of ranks; use 1 or more")
            return value

        if (nodes := size("nnodes")) > 1:
            raise ValueError(
                f"generation.sglang.args.nnodes={nodes}: a server is started on one host; start one over several "
                "yourself and name it in generation.sglang.urls"
            )
        pipeline, data = size("pp_size", "pipeline_parallel_size"), size("dp_size", "data_parallel_size")
        axes = {"tensor_parallel": tensor, "args.pp_size": pipeline, "args.dp_size": data}
        wanted = [self.named(f"{name}={value}") for name, value in axes.items() if value > 1]
        settings = ", ".join(wanted) or self.named("tensor_parallel=1")
        shape = ServerShape(tensor, pipeline, data, bool(flags.get("enable_dp_attention")), settings)
        if shape.shared_attention and size("attn_dp_size") > 1:
            raise ValueError(
                "generation.sglang.args.enable_dp_attention=true: attn_dp_size says the same in SGLang's newer words; "
                "leave enable_dp_attention out"
            )
        if shape.shared_attention and tensor % data:
            raise ValueError(
                f"generation.sglang.args.dp_size={data}: with enable_dp_attention it divides "
                f"generation.sglang.tensor_parallel={tensor}"
            )
        return shape

    @property
    def quantised(self) -> str:
        method = self.flags.get("quantization")
        return f"generation.sglang.args.quantization={method!r}" if method and method != "unquant" else ""

    @property
    def finds_stop_strings(self) -> bool:
        """Only if they are started with one."""
        return not self.urls and self.flags.get("skip_tokenizer_init") is False

    @property
    def wants_prefix_first(self) -> bool:
        """The radix cache has a prefix once a request is done."""
        return not self.flags.get("disable_radix_cache")

    def takes_pictures(self, weight_transport: str, model_type: str) -> bool:
        """Those of the run's own servers, which get their weights from disk: others were not compared."""
        return model_type in SGLANG_PICTURES and not self.urls and weight_transport == "disk"


BACKENDS: Final[dict[str, type[Backend]]] = {"embedded": Embedded, "sglang": SGLang}
"""By the value of `generation.backend`."""


def backends_that(can: Callable[[type[Backend]], bool]) -> str:
    """Return the values of `generation.backend` whose engines `can`, for messages: `embedded or sglang`."""
    return " or ".join(name for name, kind in BACKENDS.items() if can(kind))
