"""Python programs that the model writes, each run in its own sandbox (`asyncrl.plugins.sandbox`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.api import Tool, ToolResult, ToolSchema
from asyncrl.plugins.sandbox import Ended, Limits, Sandbox


class PythonTool(Tool):
    """Runs a program and returns its output. Programs are independent of each other.

    They have no network, see no files of the host but the interpreter, and write to a folder in memory; see
    `asyncrl.plugins.sandbox`. The tool's `timeout_s` in the settings must allow for waiting: only as many programs as
    cores run at a time.

    Args:
        name: name of the tool for the model.
        cpu_s: limit on a program's CPU time; its wall-clock limit is three times as long.
        memory_mb: limit on its address space.
        output_chars: limit on its output; more ends it.

    Raises:
        SandboxUnavailable: this machine cannot make a sandbox.
    """

    def __init__(
        self, *, name: str = "python", cpu_s: float = 5.0, memory_mb: int = 512, output_chars: int = 100_000
    ) -> None:
        self.name = name
        self._sandbox = Sandbox(Limits.of_cpu(cpu_s, memory_mb, output_bytes=output_chars))

    def schema(self) -> ToolSchema:
        """Return the schema: a program, under `code`."""
        code = {"type": "string", "description": "a whole Python program; print what you want to see"}
        parameters: dict[str, Any] = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        parameters["additionalProperties"] = False
        description = "Run a Python program, without network, and read what it prints. Nothing is kept between calls."
        return {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": parameters},
        }

    def execute(self, instance_id: str, arguments: Mapping[str, Any]) -> ToolResult:  # type: ignore[override]
        """Run `arguments["code"]`; runs in a thread, as it waits for the program."""
        ended = self._sandbox.run({"program.py": str(arguments["code"])}, ["program.py"])
        why = _why_it_failed(ended, self._sandbox.limits)
        text = "\n".join(filter(None, (ended.stdout.rstrip("\n"), ended.stderr.rstrip("\n"), why)))
        return ToolResult(text or "(it printed nothing)", is_error=bool(why))


def _why_it_failed(ended: Ended, limits: Limits) -> str:
    if ended.stopped == "time":
        return f"(ended: it took longer than {limits.wall_s:g} s)"
    if ended.stopped == "output":
        return f"(ended: it printed more than {limits.output_bytes} bytes)"
    return f"(exit code {ended.exit_code})" if ended.exit_code else ""
