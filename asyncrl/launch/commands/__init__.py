"""Commands of `python -m asyncrl.launch`; each module that `COMMANDS` names has its own `main`."""

COMMANDS = (
    "attach",
    "audit",
    "chaos",
    "clean",
    "completion",
    "dashboard",
    "doctor",
    "eval",
    "export",
    "init",
    "install",
    "join",
    "replay",
    "rollout",
    "show",
    "trace",
)
"""Commands that are not experiments."""
