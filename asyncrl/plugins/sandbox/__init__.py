"""Run untrusted programs without access to anything else; see `sandbox`."""

from asyncrl.plugins.sandbox.sandbox import Ended, Limits, Sandbox
from asyncrl.plugins.sandbox.users import SandboxUnavailable

__all__ = ["Ended", "Limits", "Sandbox", "SandboxUnavailable"]
