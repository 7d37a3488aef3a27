"""What SGLang servers can do, and their settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from asyncrl.config.setting import setting
from asyncrl.inference.backend import Backend, ProgramConfig, ServerShape

SGLANG_PICTURES: Final = frozenset({"glm4v", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""`model_type` of the models whose pictures SGLang servers take (`asyncrl/inference/sglang/plugin`)."""


@dataclass
class SGLangConfig(ProgramConfig):
    """SGLang servers."""

    python: str = setting("", "interpreter with sglang installed; empty: this one")
    args: dict[str, Any] = setting(help="flags of sglang.launch_server, e.g. {mem_fraction_static: 0.8}", factory=dict)


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

    program: SGLangConfig

    @property
    def shape(self) -> ServerShape:
        flags, tensor = self.flags, self.program.tensor_parallel

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
