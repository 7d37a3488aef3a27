"""Settings of the GenerationServers, and the back ends: what each engine can do, in one table.

All others ask `generation.engine` and know no engine by its name. To add one, write its folder (`host`, `checks`), its
class here, and its name in `GenerationBackend` and `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Quantization(StrEnum):
    """Values of the embedded engine's weights."""

    none = auto()
    """As they were published."""
    int8 = auto()
    """Those of linear layers as in int8, by output channel."""


@dataclass
class SGLangConfig:
    """SGLang servers."""

    python: str = setting("", "interpreter with sglang installed; empty: this one")
    urls: list[str] = setting(help="URLs of running servers, used in place of `servers`, never stopped", factory=list)
    args: dict[str, Any] = setting(help="flags of sglang.launch_server, e.g. {mem_fraction_static: 0.8}", factory=dict)
    env: dict[str, str] = setting(help="environment variables of the servers that the run starts", factory=dict)
    tensor_parallel: int = setting(1, "GPUs of each server, over which each layer is cut", unit="GPUs", minimum=1)


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
    quantization: Quantization = setting(
        Quantization.none,
        "int8: the embedded engine computes with the values that linear layers have in int8, to see what servers that "
        "quantise would do to a run; memory and speed stay those of generation.dtype. SGLang has its own, "
        "generation.sglang.args={quantization: fp8}",
    )
    max_running_requests: int = setting(256, "most sequences decoded together; more wait (embedded engine)", minimum=1)
    max_total_tokens: int = setting(
        65536, "size of the KV cache; requests beyond it wait (embedded engine)", unit="tokens", minimum=16
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
        """What the servers can do."""
        return BACKENDS[self.backend](self)


def guests_of(generation: GenerationConfig) -> range:
    """Return the indices of the servers that take turns with the trainer on its devices: the last ones.

    Raises:
        ValueError: `generation.guests` is neither none, all nor a number of servers; the message says so.
    """
    said, servers = generation.guests, len(generation.engine.urls) or generation.servers
    if said in (NO_GUESTS, ALL_GUESTS):
        count = servers if said == ALL_GUESTS else 0
    elif not said.isdecimal() or not 1 <= int(said) <= servers:
        raise ValueError(
            f"generation.guests={said!r}: none, all, or a number of the {servers} servers (generation.servers); use "
            f"{ALL_GUESTS} or 1 to {servers}"
        )
    else:
        count = int(said)
    return range(servers - count, servers)


SGLANG_PICTURES: Final = frozenset({"glm4v", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""`model_type` of the models whose pictures SGLang servers take (`asyncrl/inference/sglang/plugin`)."""


@dataclass(frozen=True, slots=True)
class ServerShape:
    """Ranks of one server along each axis.

    With `shared_attention` (`enable_dp_attention`) the data axis lies within the tensor axis and adds no ranks.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    shared_attention: bool = False

    @property
    def gpus(self) -> int:
        """Number of GPUs of the server: one per rank."""
        return self.tensor * self.pipeline * (1 if self.shared_attention else self.data)

    def __str__(self) -> str:
        axes = {"tensor_parallel": self.tensor, "args.pp_size": self.pipeline, "args.dp_size": self.data}
        named = [f"generation.sglang.{name}={value}" for name, value in axes.items() if value > 1]
        return ", ".join(named) or "generation.sglang.tensor_parallel=1"


class Backend:
    """What the servers of these settings can do. The defaults are those of an engine that can only generate text.

    Attributes:
        label: name in messages.
        host: import path of a function (worker, *, scratch, guest) that returns the `EngineHost` of a GenerationServer.
        checks: module of `check(config)` and `warnings(config)` for settings that concern this engine alone.
        server_check: import path of a function (url, config, security) that checks a server before it gets requests;
            empty: the engine itself refuses what it cannot do.
        memory_flag: its flag for the share of a GPU's free memory that a server takes; empty: `fixed_cache`.
        own_api: its servers have what this project added to SGLang's API: pictures are sent once and then named, and a
            pause ends requests at once.
        same_arithmetic: it rounds as training ranks of the same type do.
        tells_experts: answers tell which experts each token was sent to.
        loads_adapters: a version may be LoRA adapters alone.
        loads_quantised: it serves folders of quantised weights as they are.
        takes_sent_weights: weights may be sent from the trainer's memory, besides being read from disk.
        verifies_files: it verifies the checksums of the weights that it reads.
    """

    label: str
    host: str
    checks: str
    server_check = memory_flag = ""
    own_api = same_arithmetic = tells_experts = loads_adapters = False
    loads_quantised = takes_sent_weights = verifies_files = False

    def __init__(self, generation: GenerationConfig) -> None:
        self.generation = generation

    @property
    def program(self) -> SGLangConfig | None:
        """Its part of the settings if it is a program of its own; None: torch in the GenerationServer's process."""
        return None

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
        """True if `generation.max_total_tokens` and `max_running_requests` bound what a server holds."""
        return not self.memory_flag

    @property
    def memory_setting(self) -> str:
        """The setting that bounds the memory of a server."""
        if self.fixed_cache:
            return "generation.max_total_tokens"
        return f"generation.{self.generation.backend}.args.{self.memory_flag}"

    @property
    def memory_share(self) -> float | None:
        """The share of a GPU's free memory that a server is told to take; None: it is told none."""
        share: float | None = self.flags.get(self.memory_flag)
        return share

    @property
    def shape(self) -> ServerShape:
        """The ranks of each server that is started.

        Raises:
            ValueError: a flag does not fit; the message names it.
        """
        return ServerShape()

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
    checks = "asyncrl.inference.embedded.checks"
    own_api = same_arithmetic = tells_experts = loads_adapters = verifies_files = finds_stop_strings = True

    @property
    def quantised(self) -> str:
        chosen = self.generation.quantization
        return "" if chosen == "none" else f"generation.quantization={chosen}"

    def takes_pictures(self, weight_transport: str, model_type: str) -> bool:
        return True


class SGLang(Backend):
    """An SGLang server, started as a child or adopted."""

    label = "SGLang"
    host = "asyncrl.inference.sglang.host:make_host"
    checks = "asyncrl.inference.sglang.checks"
    server_check = "asyncrl.inference.sglang.server_checks:check_server"
    memory_flag = "mem_fraction_static"
    loads_quantised = takes_sent_weights = True

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
        shape = ServerShape(tensor, pipeline, data, bool(flags.get("enable_dp_attention")))
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
