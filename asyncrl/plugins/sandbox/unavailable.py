"""The error of machines that cannot make a sandbox."""


class SandboxUnavailable(RuntimeError):
    """This machine cannot make a sandbox; the message says what is missing."""
