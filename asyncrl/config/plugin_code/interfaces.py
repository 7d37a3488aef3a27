"""How asyncrl calls users' classes and functions: with which arguments, in which threads, and which state it keeps of
them.

Arguments are checked by `inspect`. What is checked has been imported, so this is for processes that run the user's
code: the check before a start (`asyncrl.launch.before_start.rehearsal`), the workers, and the launcher for data sets
and curricula, which it loads itself.
"""

from __future__ import annotations

import contextvars
import inspect
import math
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

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
    try:
        if (params := parameters(found, positional)) is not None:
            check_arguments(repr(path), params, args, "args", supplied)
    except ValueError as error:
        yield f"{group}.args={dict(args)}: {error}"


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


_T = TypeVar("_T")
_Job = tuple[Callable[[], Any], "Future[Any]", contextvars.Context]


class UnusualExit(Exception):
    """The function raised an exception that an event loop cannot pass on: SystemExit, KeyboardInterrupt,
    StopIteration.
    """


class DaemonThreads:
    """Runs functions, each in a thread; thread-safe. `started` counts the threads made so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[_Job]] = []
        self.started = 0

    def run(self, function: Callable[[], _T]) -> Future[_T]:
        """Begin `function` in a thread, within the caller's context variables.

        An exception that an event loop cannot carry becomes the cause of an `UnusualExit`.
        """
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            jobs = self._idle.pop() if self._idle else None
            if jobs is None:
                self.started += 1
        if jobs is None:
            jobs = queue.SimpleQueue()
            name = f"user-code-{self.started}"
            threading.Thread(target=self._work, args=(jobs,), name=name, daemon=True).start()
        jobs.put((function, future, contextvars.copy_context()))
        return future

    def _work(self, jobs: queue.SimpleQueue[_Job]) -> None:
        while True:
            function, future, context = jobs.get()
            value, error = _outcome(function, context)
            with self._lock:
                self._idle.append(jobs)
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
            del function, future, context, value, error  # an idle thread must not keep its last call's objects alive


def _outcome(function: Callable[[], Any], context: contextvars.Context) -> tuple[Any, BaseException | None]:
    try:
        return context.run(function), None
    except (StopIteration, StopAsyncIteration) as error:
        unusual = UnusualExit(f"raised {type(error).__name__}")
    except Exception as error:
        return None, error
    except BaseException as error:
        unusual = UnusualExit(f"raised {type(error).__name__}")
        unusual.__cause__ = error
    return None, unusual


def plain_state(state: Any, where: str = "state()") -> Any:
    """Return a copy of `state` as a checkpoint restores it: tuples become lists.

    Raises:
        TypeError: a value would not survive JSON unchanged; the message names the value and its place.
    """
    if state is None or isinstance(state, (str, bool, int)):
        return state
    if isinstance(state, float):
        if not math.isfinite(state):
            raise TypeError(f"{where} is {state}, which JSON does not have")
        return state
    if isinstance(state, (list, tuple)):
        return [plain_state(each, f"{where}[{index}]") for index, each in enumerate(state)]
    if isinstance(state, dict):
        for key in state:
            if not isinstance(key, str):
                raise TypeError(
                    f"{where} has the key {key!r}, which JSON would restore as text; use str(...) or a list"
                )
        return {key: plain_state(each, f"{where}[{key!r}]") for key, each in state.items()}
    raise TypeError(
        f"{where} is a {type(state).__name__}; state must be plain data for JSON: texts, numbers, lists, mappings"
    )
