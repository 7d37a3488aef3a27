"""The sandbox in which chat templates are rendered: Jinja's, with limits on time and size.

A template comes with a model's folder and is as untrusted as data. Jinja's immutable sandbox hides Python's objects
from it, but limits neither loops nor texts. Here every rendering has a `_Budget`:

- Each turn of a loop, each test of a loop's filter and each call of a macro, function or filter checks the CPU time.
  The checks are nodes that are added to the parsed template.
- Each value that an operator, a literal, a filter or a call makes, and each value that is printed, is measured. An
  operation that can make much out of little (`*`, `**`, `%`, `replace`, `join`, `indent`) is measured beforehand.

Filters and methods of text that can take long and that no chat template has a use for are missing; they are refused by
name. Otherwise environment, filters and functions are those of `PreTrainedTokenizerBase.apply_chat_template`.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_LIMIT_S: Final = 2.0
"""CPU time limit of one rendering, in s; a usual one takes less than a thousandth of it."""
VALUE_LIMIT: Final = 64_000_000
"""Largest value that a template may make, in characters; other values count as `_PER_VALUE` characters."""
TOTAL_LIMIT: Final = 2_000_000_000
"""Characters that one rendering may make in all, intermediate values included."""
BITS_LIMIT: Final = 1 << 16
"""Bits of the largest integer."""
_PER_VALUE: Final = 8
_CHECKED_EACH: Final = 16
"""Steps between two looks at the clock."""
_WITHOUT_FILTERS: Final = (
    *("center", "wordwrap", "urlize", "xmlattr", "striptags", "pprint", "slice", "batch", "filesizeformat"),
    *("random", "forceescape", "truncate"),
)
_WITHOUT_METHODS: Final = ("center", "ljust", "rjust", "zfill", "expandtabs", "translate", "to_bytes", "format_map")
_LARGE_WIDTH: Final = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)|\{[^{}]*(?::[^{}]*\d{5}|\{)")
"""A width of five digits or more, or a computed one, in a format of `%` or `str.format`."""


class TemplateRefusal(ValueError):
    """The template refuses the conversation, or is not a valid template."""


class TemplateLimit(RuntimeError):
    """A template takes more time or memory than any conversation needs: it is broken or hostile."""


class _Budget:
    """The time, characters and steps that one rendering has used."""

    def __init__(self) -> None:
        self._until = time.thread_time() + CPU_LIMIT_S
        self._steps = self._total = 0
        self._sizes: dict[int, tuple[Any, int]] = {}
        """Sizes of lists and maps by id, with the value itself, so that the id stays its own."""

    def step(self) -> None:
        self._steps += 1
        if self._steps % _CHECKED_EACH == 0 and time.thread_time() > self._until:
            raise TemplateLimit(f"needs more than {CPU_LIMIT_S:g} s of CPU time for one conversation")

    def spend(self, chars: int) -> None:
        self._total += chars
        if chars > VALUE_LIMIT or self._total > TOTAL_LIMIT:
            raise TemplateLimit(
                f"makes more than {VALUE_LIMIT} characters of one conversation, or {TOTAL_LIMIT} on the way"
            )

    def size(self, value: Any) -> int:
        """Return the size of `value` when it is written out; shared parts count as often as they occur."""
        if isinstance(value, str):
            return _PER_VALUE + len(value)
        if not isinstance(value, list | tuple | dict):
            return _PER_VALUE
        if (known := self._sizes.get(id(value))) is not None:
            return known[1]
        parts = value if not isinstance(value, dict) else [part for pair in value.items() for part in pair]
        size = _PER_VALUE + sum(map(self.size, parts))
        self._sizes[id(value)] = value, size
        return size

    def made(self, value: Any) -> Any:
        """Return `value`, which the template made, after measuring it."""
        self.step()
        if isinstance(value, int):
            if value.bit_length() > BITS_LIMIT:
                raise TemplateLimit(f"makes an integer of more than {BITS_LIMIT} bits")
        elif isinstance(value, str | list | tuple | dict):
            self.spend(self.size(value))
        return value


_budget: ContextVar[_Budget] = ContextVar("budget")


def render(source: str, variables: Mapping[str, Any] | None, now: datetime) -> str:
    """Render the template `source` with `variables`, which are plain data, at the time `now`; without variables it is
    only compiled.

    Raises:
        TemplateRefusal: the template fails, or is not valid.
        TemplateLimit: it takes more than the limits.
    """
    budget = _Budget()
    token = _budget.set(budget)
    try:
        try:
            template = _compiled(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, ValueError, TypeError, MemoryError) as error:
            raise TemplateRefusal(f"is no Jinja template ({error})") from None
        if variables is None:
            return ""
        plain = _plain(dict(variables))
        try:
            pieces = []
            for piece in template.generate({"strftime_now": now.strftime, **plain}):
                budget.spend(len(piece))
                pieces.append(piece)
            text = "".join(pieces)
            budget.spend(len(text))
        except TemplateLimit:
            raise
        except Exception as error:
            raise TemplateRefusal(f"refuses it ({type(error).__name__}: {error})") from None
        _unicode(text)
        return text
    finally:
        _budget.reset(token)


def _plain(value: Any) -> Any:
    """Return a copy of `value` of Python's own types.

    Raises:
        TemplateRefusal: it is, or has, anything but text, numbers, true, false, null, lists and maps.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise TemplateRefusal(
        f"gets a value that is not plain data (a {type(value).__name__}); messages, tools and "
        "dataset.chat_template_args may hold text, numbers, true, false, null, lists and maps"
    )


def _unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TemplateRefusal(f"gets a value that is not plain data (text with half of a character: {error})") from None


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for programs that need a mask; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox that charges the current `_Budget`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=lambda value: _budget.get().made(value),
        )
        self.filters = {name: _charged(each) for name, each in self.filters.items() if name not in _WITHOUT_FILTERS} | {
            "tojson": _charged(_tojson)
        }
        self.globals = {
            "range": self.globals["range"],
            "raise_exception": _raise_exception,
            "dict": _Dict(),
            "namespace": _Namespace,
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        kinds: Any = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)
        blocks: list[Any] = list(tree.find_all(kinds))
        for block in blocks:
            written = sum(len(data.data) for data in block.find_all(nodes.TemplateData))
            counted = self._call("counted", [nodes.Const(written)], block.lineno)
            block.body.insert(0, nodes.ExprStmt(counted).set_lineno(block.lineno))
            if isinstance(block, nodes.For) and block.test is not None:
                counted = self._call("counted", [nodes.Const(0)], block.lineno)
                block.test = nodes.And(counted, block.test).set_lineno(block.lineno)
        return _Rewriting(self).visit(tree)  # type: ignore[no-any-return]

    def _call(self, name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)
        call.set_lineno(line)
        return call

    def counted(self, chars: int) -> bool:
        """Charge one turn of a loop or one run of a block, which writes `chars` characters of the template."""
        _budget.get().step()
        _budget.get().spend(chars)
        return True

    def joined(self, *parts: Any) -> str:
        """Join the parts of `a ~ b`."""
        texts = [str(part) for part in parts]
        _budget.get().spend(sum(map(len, texts)))
        return "".join(texts)

    def made(self, value: Any) -> Any:
        """Measure a list or map that the template wrote."""
        return _budget.get().made(value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See the base class."""
        budget = _budget.get()
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(many, str | list | tuple):
                    budget.spend(budget.size(many) * max(times, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * max(right, 0) > BITS_LIMIT:
                raise TemplateLimit(f"makes an integer of more than {BITS_LIMIT} bits")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
            budget.spend(len(left) + budget.size(right) * left.count("%"))
        elif operator == "+" and isinstance(left, str | list | tuple):
            budget.spend(budget.size(left) + budget.size(right))
        return budget.made(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """See the base class."""
        refused = attr in _WITHOUT_METHODS and isinstance(obj, str | int)
        return not refused and super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """See the base class."""
        found = super().getitem(obj, argument)
        return _budget.get().made(found) if isinstance(argument, slice) else found

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """See the base class."""
        budget = _budget.get()
        budget.step()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) or name in ("format", "format_map"):
            _check_amplified(name, owner, args, kwargs)
        return budget.made(super().call(__context, __obj, *args, **kwargs))


class _Rewriting(jinja2.visitor.NodeTransformer):
    """Sends what `a ~ b` and literals of lists and maps make through the environment's checks."""

    def __init__(self, environment: _Environment) -> None:
        self._environment = environment

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._environment._call("joined", node.nodes, node.lineno)

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._environment._call("made", [node], node.lineno)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" else self._environment._call("made", [node], node.lineno)


def _charged(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter `plain`, whose results are measured."""

    @functools.wraps(plain)  # with the marks that say which arguments Jinja passes
    def charged(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        at = 1 if hasattr(plain, "jinja_pass_arg") else 0
        value, rest = args[at], list(args[at + 1 :])
        name = plain.__name__.removeprefix("do_")
        if name == "join":
            value = list(value)
            args = (*args[:at], value, *rest)
        _check_amplified(name, value, rest, kwargs)
        return budget.made(plain(*args, **kwargs))

    return charged


def _check_amplified(name: str, value: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Charge what the method or filter `name` of `value` is about to make, if that can be much more than `value`."""
    budget = _budget.get()
    given = [*args, *kwargs.values()]
    if name == "replace" and len(given) >= 2:
        text, old, new = str(value), str(given[0]), str(given[1])
        budget.spend(len(text) + text.count(old) * len(new))
    elif name == "join":
        parts = list(given[0]) if isinstance(value, str) and given else value
        between = value if isinstance(value, str) else given[0] if given else ""
        budget.spend(sum(map(budget.size, parts)) + len(parts) * len(str(between)))
    elif name == "format":
        _check_format(str(value) if isinstance(value, str) else "{:99999}")
        budget.spend(
            len(str(value)) + sum(map(budget.size, given)) * max(1, str(value).count("{") + str(value).count("%"))
        )
    elif name in ("indent", "tojson", "round"):
        width = max((each if isinstance(each, int) else len(str(each)) for each in given), default=0)
        if width > 99:
            raise TemplateLimit(f"asks for a width of {width}")
        budget.spend(budget.size(value) * (1 + (width if name == "indent" else 0)))
    elif name == "list" and isinstance(value, str):
        budget.spend(len(value) * _PER_VALUE * 2)


def _check_format(text: str) -> None:
    if _LARGE_WIDTH.search(text):
        raise TemplateLimit("asks for a width of five digits or more, or a computed one")


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    if len(source) > 4_000_000:
        raise TemplateLimit(f"has {len(source)} characters")
    return _Environment().from_string(source)


class _Dict:
    """The function `dict`; the type itself would give access to more of Python."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace`, as transformers restricts it: no names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=...)` is allowed
        self, args = args[0], args[1:]
        attrs = dict(*args, **kwargs)
        for name in attrs:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attrs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # its values may hold each other, and be endless when written out


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attributes that begin with an underscore, as {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert a value to JSON without escaping HTML, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_tojson.__name__ = "tojson"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
