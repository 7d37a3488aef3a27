"""One error, in the form of each API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_OPENAI_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error"}
_ANTHROPIC_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class ApiError(Exception):
    """A call that is not served.

    Attributes:
        status: the HTTP status.
        message: what is wrong, and what to do.
        param: the field of the request that is wrong.
        code: a short name of the case.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def openai(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """Return the error in Anthropic's form."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def refused(param: str, value: object, why: str) -> ApiError:
    """Return the error for a request whose `param` asks for something unsupported."""
    return ApiError(400, f"{param}={_shown(value)}: {why}", param=param, code="unsupported_parameter")


def invalid(param: str, why: str) -> ApiError:
    """Return the error for a request whose field `param` is invalid."""
    return ApiError(400, f"{param}: {why}", param=param, code="invalid_value")


HEADERS: Final[Mapping[str, str]] = {"x-should-retry": "false"}
"""Sent with every error: the same call would fail again, as the policy's client has retried already."""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
