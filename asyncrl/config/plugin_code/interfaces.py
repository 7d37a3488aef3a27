"""How asyncrl calls users' classes and functions: with which arguments.

Arguments are checked by `inspect`. What is checked has been imported, so this is for processes that run the user's
code: the check before a start (`asyncrl.launch.before_start.rehearsal`), the workers, and the launcher for data sets
and curricula, which it loads itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from asyncrl.api import Agent, Environment
from asyncrl.config.plugin_code.catalog import Param, Params, check_arguments
from asyncrl.config.plugin_code.import_paths import PluginError, load_plugin

_OFFERED_TO_AGENTS: Final = ("tokenizer", "chat", "tools")
"""Keyword arguments that agents with parameters of these names receive. A class of agents must accept the first."""
_TAKES: Final[Mapping[str, Sequence[str]]] = {
    "run": ("prompt", "env", "client"),
    "run_group": ("prompt", "make_env", "client"),
    "collect_trajectory": ("prompt", "env", "obs_queue", "act_queue"),
    "step": ("action",),
}
"""Arguments that the methods of agents and environments receive by position."""


def parameters(found: Any, positional: int = 0) -> Params | None:
    """Return the parameters of the class or function `found` after its first `positional` ones, by name; None if it
    takes any name, or does not tell.
    """
    if inspect.isclass(found) and issubclass(found, Agent) and found.__init__ is object.__init__:
        return {}  # `Agent.__new__` takes all that an `__init__` may
    try:
        signature = inspect.signature(found, follow_wrapped=False)  # what a decorator does to the arguments is its own
    except (TypeError, ValueError):  # a builtin may have none
        return None
    taken = list(signature.parameters.values())
    if any(each.kind is each.VAR_KEYWORD for each in taken):
        return None
    by_name = [each for each in taken if each.kind is not each.VAR_POSITIONAL]
    return {each.name: _param(each) for each in by_name[positional:]}


def names(found: Any) -> tuple[str, ...]:
    """Return the names that the class or function `found` lists; none if it does not tell."""
    try:
        taken = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(each.name for each in taken if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))


def _param(found: inspect.Parameter) -> Param:
    given = found.annotation
    text = "" if given is found.empty else given if isinstance(given, str) else inspect.formatannotation(given)
    required = found.default is found.empty
    return Param(found.name, text, required, None if required else found.default)


def call_problems(
    group: str, path: str, found: Any, args: Mapping[str, Any], supplied: Collection[str] = (), positional: int = 0
) -> Iterator[str]:
    """Yield an error message for each problem of calling `found`, which `<group>.path` names, with `<group>.args`.

    Args:
        supplied: keyword arguments that asyncrl passes itself.
        positional: number of arguments passed by position, before the configured ones.
    """
    if not callable(found):
        yield f"{group}.path={path!r}: it is a {type(found).__name__}; name a class or function"
        return
    params: Params | None = None
    try:
        if (params := parameters(found, positional)) is not None:
            check_arguments(repr(path), params, args, "args", supplied)
    except ValueError as error:
        unknown = [] if params is None or "[" in group else [key for key in args if key not in params]
        inherited = f"; an inherited one goes with '~{group}.args.{unknown[0]}' on the command line" if unknown else ""
        yield f"{group}.args={dict(args)}: {error}{inherited}"


def problems(
    group: str, path: str, args: Mapping[str, Any], supplied: Collection[str] = (), positional: int = 0
) -> Iterator[str]:
    """Yield the same for the path, which is imported."""
    try:
        found = load_plugin(path)
    except PluginError as error:
        yield f"{group}.path={error}"
        return
    yield from call_problems(group, path, found, args, supplied, positional)


def agent_problems(group: str, path: str, args: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each problem of the agent at `path` and its `args`.

    The agent is a class or a function `run(prompt, env, client)`.
    """
    try:
        found = load_plugin(path)
    except PluginError as error:
        yield f"{group}.path={error}"
        return
    is_class = inspect.isclass(found)
    if callable(found) and (why := _agent_fault(found) if is_class else _function_fault(found)) is not None:
        yield f"{group}.path={path!r}: {why}"
        return
    positional, required = (0, _OFFERED_TO_AGENTS[:1]) if is_class else (len(_TAKES["run"]), ())
    taken = parameters(found, positional) or {} if callable(found) else {}
    offered = dict.fromkeys((*required, *(name for name in _OFFERED_TO_AGENTS if name in taken)))
    yield from call_problems(group, path, found, args, offered, positional)


def environment_problems(group: str, path: str, args: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each problem of the environment at `path`, a class or a function, and its `args`."""
    try:
        found = load_plugin(path)
    except PluginError as error:
        yield f"{group}.path={error}"
        return
    if inspect.isclass(found) and (why := _environment_fault(found)) is not None:
        yield f"{group}.path={path!r}: {why}"
        return
    yield from call_problems(group, path, found, args, supplied=("reward",))


def _function_fault(function: Callable[..., Any]) -> str | None:
    if not _can_be_called(function, *_TAKES["run"], in_part=True):
        return "an episode is run(prompt, env, client); give it these three parameters"
    return _yields(getattr(function, "__name__", "run"), function)


def _agent_fault(found: type) -> str | None:
    if not issubclass(found, Agent):
        return "it is not an asyncrl.api.Agent; derive it from that class, or name a function run(prompt, env, client)"
    try:
        form = found.form()
    except TypeError as error:
        return str(error)
    return _method_fault(found.__name__, found, form) if form in _TAKES else None


def _environment_fault(found: type) -> str | None:
    if not issubclass(found, Environment):
        return (
            "it is not an asyncrl.api.Environment; derive it from that class (one of gymnasium's is named by "
            "gymnasium:<registered name>)"
        )
    for name in ("reset", "step"):
        if name in found.__abstractmethods__:
            return f"it does not implement `{name}`"
    if not _can_be_called(found.reset, *_instance(found, "reset"), seed=None, options=None):
        return "`reset` receives seed and options by name; add the parameters seed and options, and no others"
    return _yields("reset", found.reset) or _method_fault("the environment", found, "step")


def _method_fault(whose: str, owner: type, name: str) -> str | None:
    """Return an error message if the method cannot be called with its arguments; None if it can."""
    method, given = getattr(owner, name), _TAKES[name]
    if not _can_be_called(method, *_instance(owner, name), *given):
        return f"{whose}: `{name}` is called as {name}({', '.join(given)}); give it these parameters"
    return _yields(name, method)


def _instance(owner: type, name: str) -> tuple[None, ...]:
    """Return the arguments that a method of `owner` receives before the caller's: a stand-in for `self`."""
    return () if isinstance(inspect.getattr_static(owner, name), staticmethod | classmethod) else (None,)


def _can_be_called(function: Callable[..., Any], *args: Any, in_part: bool = False, **named: Any) -> bool:
    """True if `function` takes these arguments; `in_part`: and may need others. True also if it does not tell."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return True
    try:
        (signature.bind_partial if in_part else signature.bind)(*args, **named)
    except TypeError:
        return False
    return True


def _yields(name: str, function: Callable[..., Any]) -> str | None:
    """Return an error message if `function` is a generator."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return f"`{name}` contains `yield`, so a call returns a generator; return the result instead"
    return None
