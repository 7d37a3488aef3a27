"""An SGLang server, started as a child process."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from asyncrl.comm.security import HttpSecurity
from asyncrl.config.memory_advice import in_order, is_out_of_memory
from asyncrl.inference.child.host import ChildHost
from asyncrl.inference.child.ports import PortBlock
from asyncrl.inference.child.process_tree import ServerCommand
from asyncrl.inference.sglang.command import build_command

_NO_ROOM_FOR_THE_CACHE = "not enough memory. please try to increase --mem-fraction-static"


class SGLangHost(ChildHost):
    """Its schedulers and its detokenizer are processes of their own."""

    label, child_title = "SGLang", "sglang::"

    def command(self, ports: PortBlock, scratch: Path) -> ServerCommand:
        return build_command(
            self.config,
            model_dir=Path(str(self.config.model.path)),
            ports=ports,
            device=self.device,
            secrets_file=_write_secrets(scratch, self.security),
            scratch=scratch,
            guest=self.guest,
        )

    @staticmethod
    def advice(lines: Sequence[str]) -> str:
        log = "\n".join(lines)
        if _NO_ROOM_FOR_THE_CACHE in log.lower():
            return (
                "its part of the GPU's memory holds the weights but no KV cache: raise "
                "generation.sglang.args.mem_fraction_static, or set a larger generation.sglang.tensor_parallel"
            )
        if is_out_of_memory(log):
            return in_order(
                [
                    "lower generation.sglang.args.mem_fraction_static, the part for weights and KV cache",
                    "lower generation.sglang.args.chunked_prefill_size",
                    "set a larger generation.sglang.tensor_parallel",
                    "give the server a GPU of its own",
                ]
            )
        return ""


def _write_secrets(scratch: Path, security: HttpSecurity | None) -> Path | None:
    """Write API key and TLS as a config file for SGLang, and return it. Only this user can read it; all users can read
    a command line.
    """
    if security is None:
        return None
    file = scratch / "secrets.yaml"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        pem = str(security.file)
        json.dump({"api-key": security.token, "ssl-keyfile": pem, "ssl-certfile": pem}, stream)  # JSON is YAML
    return file
