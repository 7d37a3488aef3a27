"""Check the interface of a user's agent or environment in its source, without running it.

As in `signatures`, the workers check everything that the source does not show, when they construct the object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.api.agent import AGENT_METHODS, ambiguous
from asyncrl.config.plugin_code import signatures
from asyncrl.config.plugin_code.import_paths import Definition, PluginError, definition

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_OFFERED_TO_AGENTS: Final = ("tokenizer", "chat", "tools")
"""Keyword arguments that agents with parameters of these names receive. A class of agents must accept the first."""
_AGENT: Final = ("asyncrl.api.agent", "Agent")
_ENVIRONMENT: Final = ("asyncrl.api.environment", "Environment")
_AROUND_AGENTS, *_OF_AGENTS = AGENT_METHODS
_TAKES: Final[Mapping[str, Sequence[str]]] = {
    "run": ("prompt", "env", "client"),
    "run_group": ("prompt", "make_env", "client"),
    "collect_trajectory": ("prompt", "env", "obs_queue", "act_queue"),
    "step": ("action",),
    "reset": (),
}
"""Arguments that the methods of agents and environments receive by position."""
_RESET_BY_NAME: Final = ("seed", "options")


@dataclass(frozen=True)
class _Line:
    """A class and its bases below `base`, the nearest first, as far as the source shows them.

    `ends_at_base`: True if the bases end at `base`; None if the source does not show it.
    """

    classes: Sequence[ast.ClassDef]
    ends_at_base: bool | None


def agent_problems(group: str, path: str, args: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each problem of the agent at `path` and its `args`.

    The agent is a class or a function `run(prompt, env, client)`.
    """
    try:
        found = definition(path)
        match found:
            case Definition(node=ast.FunctionDef() | ast.AsyncFunctionDef() as function):
                positional, required = len(_TAKES["run"]), tuple[str, ...]()
                if (why := _function_wrong(function)) is not None:
                    yield f"{group}.path={path!r}: {why}"
                    return
            case Definition(node=ast.ClassDef()):
                positional, required = 0, _OFFERED_TO_AGENTS[:1]
                if (why := _agent_wrong(_line(found, _AGENT))) is not None:
                    yield f"{group}.path={path!r}: {why}"
                    return
            case _:
                positional, required = 0, _OFFERED_TO_AGENTS[:1]
        takes = signatures.names(path, positional)
        named = [name for name in _OFFERED_TO_AGENTS if name in takes]
    except PluginError as error:
        yield f"{group}.path={error}"
        return
    yield from signatures.problems(group, path, args, tuple(dict.fromkeys((*required, *named))), positional)


def environment_problems(group: str, path: str, args: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each problem of the environment at `path`, a class or a function, and its `args`."""
    try:
        found = definition(path)
    except PluginError as error:
        yield f"{group}.path={error}"
        return
    match found:
        case Definition(node=ast.ClassDef()) if (why := _environment_wrong(_line(found, _ENVIRONMENT))) is not None:
            yield f"{group}.path={path!r}: {why}"
            return
    yield from signatures.problems(group, path, args, supplied=("reward",))


def _function_wrong(function: _Function) -> str | None:
    taken = function.args
    if len([*taken.posonlyargs, *taken.args]) < len(_TAKES["run"]) and taken.vararg is None:
        return "an episode is run(prompt, env, client); give it these three parameters"
    return _yields(function)


def _agent_wrong(line: _Line) -> str | None:
    if line.ends_at_base is False:
        return "it is not an asyncrl.api.Agent; derive it from that class, or name a function run(prompt, env, client)"
    for class_ in line.classes:
        own = _methods(class_)
        forms = [form for form in AGENT_METHODS if form in own]
        if not forms:
            continue
        if forms[0] == _AROUND_AGENTS:
            return None
        if ambiguous(forms):
            both = " and ".join(f"`{form}`" for form in forms)
            return f"{class_.name} implements {both}, of which only one would be called; keep one"
        return _method_wrong(class_.name, own[forms[0]])
    if line.ends_at_base is None:
        return None
    return f"it implements none of {', '.join(_OF_AGENTS)}; implement `run(self, prompt, env, client)`"


def _environment_wrong(line: _Line) -> str | None:
    if line.ends_at_base is False:
        return (
            "it is not an asyncrl.api.Environment; derive it from that class (one of gymnasium's is named by "
            "gymnasium:<registered name>)"
        )
    found: dict[str, ast.stmt] = {}
    for class_ in reversed(line.classes):
        found |= _methods(class_)
    for name in ("reset", "step"):
        if name not in found and line.ends_at_base:
            return f"it does not implement `{name}`"
        if name in found and (why := _method_wrong("the environment", found[name])) is not None:
            return why
    match found.get("reset"):
        case ast.FunctionDef() | ast.AsyncFunctionDef() as reset if reset.args.kwarg is None:
            by_name = [arg.arg for arg in (*reset.args.args, *reset.args.kwonlyargs)]
            if missing := [name for name in _RESET_BY_NAME if name not in by_name]:
                return f"`reset` receives seed and options by name; add the parameters {' and '.join(missing)}"
    return None


def _method_wrong(whose: str, method: ast.stmt) -> str | None:
    """Return an error message if `method` cannot be called with its arguments; None if it can, or if unclear."""
    if not isinstance(method, _Function) or method.decorator_list:
        return None
    given, taken = _TAKES[method.name], method.args
    plain = [arg.arg for arg in (*taken.posonlyargs, *taken.args)][1:]
    needed = plain[: len(plain) - len(taken.defaults)] if taken.defaults else plain
    needed = [name for name in needed if name not in _RESET_BY_NAME] if method.name == "reset" else needed
    unset = [arg.arg for arg, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if default is None]
    unset = [name for name in unset if method.name != "reset" or name not in _RESET_BY_NAME]
    if (len(plain) < len(given) and taken.vararg is None) or len(needed) > len(given) or unset:
        return f"{whose}: `{method.name}` is called as {method.name}({', '.join(given)}); give it these parameters"
    return _yields(method)


def _yields(function: _Function) -> str | None:
    """Return an error message if `function` is a generator."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return f"`{function.name}` contains `yield`, so a call returns a generator; return the result instead"
        if not isinstance(node, _Function | ast.Lambda | ast.ClassDef):
            pending += ast.iter_child_nodes(node)
    return None


def _methods(class_: ast.ClassDef) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in class_.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found[name] = node
            case ast.Assign(targets=targets):
                found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                found[name] = node
    return found


def _line(found: Definition, base: tuple[str, str]) -> _Line:
    classes: list[ast.ClassDef] = []
    at: Definition | None = found
    while True:
        if at is None or not isinstance(at.node, ast.ClassDef) or at.node in classes:
            return _Line(classes, None)
        if (at.module, at.node.name) == base:
            return _Line(classes, True)
        classes.append(at.node)
        named = signatures.named_bases(at.node)
        if not named:
            return _Line(classes, None if at.node.keywords else False)
        if len(named) > 1 or not named[0].isidentifier():
            return _Line(classes, None)
        try:
            at = definition(f"{at.module}:{named[0]}")
        except PluginError:  # defined when its module runs
            return _Line(classes, None)
