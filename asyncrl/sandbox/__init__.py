"""Strangers' programs, run where they can harm nothing: see `sandbox`."""

from asyncrl.sandbox.sandbox import Ended, Limits, Sandbox
from asyncrl.sandbox.unavailable import SandboxUnavailable

__all__ = ["Ended", "Limits", "Sandbox", "SandboxUnavailable"]
