"""Sandbox for a model's chat template: no access to Python attributes, and bounded work and memory.

A template comes with a model from an untrusted author, and its loops run over what a client sent. Loops and calls draw
from a budget per rendering; operators, filters and methods that can expand their input are capped. What cannot be
capped here (comparing two deeply nested lists) is stopped by the limits of the process that renders
(`router/text/process.py`).
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Sized
from contextvars import ContextVar
from itertools import islice
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# of one rendering; one loop iteration is one step; a normal template needs hundreds per message
MAX_STEPS = 1_000_000
CALL_STEPS = 10  # cost of a macro call relative to a loop iteration
MAX_SIZE = 16 << 20  # characters of one value, or items of one list
MAX_NUMBER = 100_000  # widths, counts and exponents
MAX_BITS = 4096  # in an integer product
_budget: ContextVar[list[int]] = ContextVar("steps left")
_WIDE_PERCENT = re.compile(r"\d{6}|[*]")
_WIDE_BRACES = re.compile(r"\d{6}|:[^}]*\{")
_NUMBER_FILTERS = ("batch", "center", "indent", "slice", "truncate", "wordwrap")
# Filters that do not look into list items; all others may turn the whole content into one text.
_SHALLOW_FILTERS = {
    "attr",
    "batch",
    "count",
    "d",
    "default",
    "dictsort",
    "first",
    "groupby",
    "items",
    "last",
    "length",
    "list",
    "map",
    "max",
    "min",
    "random",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
    "slice",
    "sort",
    "sum",
    "unique",
}
_CONTAINERS = (list, tuple, dict, set, frozenset)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates as transformers does, with limits. Render with `render`, which sets the budget."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=_pay_for_output,
        )
        self.filters["tojson"] = _to_json
        self.filters["format"] = _format
        self.filters.update({name: _paid(name, each) for name, each in self.filters.items()})
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now
        # Reached as attributes of the environment: a template can redefine a global, but not these.
        self.metered = _metered
        self.concatenated = _concatenated

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Call(nodes.EnvironmentAttribute("metered"), [loop.iter], [], None, None)
        _MeterConcat().visit(tree)
        tree.set_environment(self)
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Meter every call that a template makes: macros, methods of strings, globals."""
        _draw(CALL_STEPS)
        if isinstance(getattr(__obj, "__self__", None), str):
            _check_method(__obj, args, kwargs)
        if isinstance(__obj, LoopContext) and args:  # {% for ... recursive %}
            args = (_metered(args[0]), *args[1:])
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, range):
            _draw(len(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        if _WIDE_BRACES.search(value.__self__):
            raise SecurityError("the template uses a format that is too wide")

        @functools.wraps(wrapped)
        def checked(*args: Any, **kwargs: Any) -> str:
            _check_nested([*args, *kwargs.values()])
            return str(wrapped(*args, **kwargs))

        return checked

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and (_size(left) or _size(right)):
            times = right if _size(left) else left
            _check_size(max(_size(left), _size(right)) * (times if isinstance(times, int) else 1))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > MAX_BITS:
                raise SecurityError("the template computes a product that is too large")
        elif operator == "+":
            _check_size(_size(left) + _size(right))
        elif operator == "**" and (abs(right) > 64 or abs(left) > MAX_NUMBER):
            raise SecurityError("the template computes a power that is too large")
        elif operator == "%" and isinstance(left, str):
            if _WIDE_PERCENT.search(left):
                raise SecurityError("the template uses a format that is too wide")
            _check_nested(right)
        return super().call_binop(context, operator, left, right)

    def render(self, template: jinja2.Template, variables: dict[str, Any], limit: int) -> str:
        """Return the rendered text. Raises SecurityError beyond the limits, and whatever the template raises."""
        token = _budget.set([MAX_STEPS])
        try:
            parts, size = [], 0
            for part in template.generate(variables):
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise SecurityError(f"the rendered prompt has more than {limit} characters")
            return "".join(parts)
        finally:
            _budget.reset(token)


class _Generation(Extension):
    """Supports `{% generation %}`, which marks assistant text for training: renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MeterConcat(NodeTransformer):
    """Meters `a ~ b`, which can double a text as `+` does and for which jinja has no hook."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("concatenated"), node.nodes, [], None, None)


def _concatenated(*values: Any) -> str:
    for value in values:
        _check_nested(value)
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _pay_for_output(value: Any) -> Any:
    """Charge for everything a template prints, also into a variable or from a macro."""
    if _budget.get(None) is not None:  # unset for constants, which are folded while the template is compiled
        if isinstance(value, str):
            _draw(len(value) >> 8)
        else:
            _check_nested(value)
    return value


def _draw(steps: int) -> None:
    left = _budget.get()
    left[0] -= steps
    if left[0] < 0:
        raise SecurityError(f"the template needs more than {MAX_STEPS} steps")


def _metered(iterable: Iterable[Any]) -> Iterable[Any]:
    """Charge for all items of an iterable before a loop runs over it."""
    if not isinstance(iterable, Sized):
        iterable = list(islice(iterable, MAX_STEPS + 1))
    _draw(1 + len(iterable))
    return iterable


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _filter_steps(value: Any) -> int:
    return len(value) >> 6 if isinstance(value, str) else 4 * _size(value)


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise SecurityError("the template builds a value that is too large")
    _draw(size >> 8)  # long values cost in proportion


def _check_nested(value: Any) -> None:
    """Charge for everything inside a value, as often as it occurs: nested references can grow exponentially."""
    if not isinstance(value, _CONTAINERS):
        return
    characters, rest = 0, [value]
    while rest:
        each = rest.pop()
        if isinstance(each, str):
            characters += len(each)
        elif isinstance(each, dict):
            _draw(1 + 2 * len(each))
            rest.extend(each.keys())
            rest.extend(each.values())
        elif isinstance(each, _CONTAINERS):
            _draw(1 + len(each))
            rest.extend(each)
    _check_size(characters)


def _check_numbers(args: Iterable[Any]) -> None:
    if any(isinstance(arg, int) and abs(arg) > MAX_NUMBER for arg in args):
        raise SecurityError("the template passes a number that is too large")


def _check_method(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _check_numbers((*args, *kwargs.values()))
    text = method.__self__
    _draw(len(text) >> 6)
    if method.__name__ == "join":
        _check_nested([*args, *kwargs.values()])
        _check_size(len(text) * max(map(_size, args), default=0))
    elif method.__name__ == "expandtabs":
        width = next(iter((*args, *kwargs.values())), 8)
        _check_size(len(text) + text.count("\t") * (width if isinstance(width, int) else 1))
    elif method.__name__ == "translate":
        table = args[0] if args and isinstance(args[0], dict) else {}
        _check_size(len(text) * max(map(_size, table.values()), default=1))
    if (
        method.__name__ == "replace"
        and len(args) >= 2
        and isinstance(args[0], str)
        and isinstance(args[1], str)
    ):
        _check_size(len(text) + text.count(args[0]) * len(args[1]))


def _paid(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that it draws from the budget by the size of its input and its numbers are capped."""

    @functools.wraps(function)  # keeps jinja's marks, such as pass_environment
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _draw(1 + max(map(_filter_steps, args), default=0))
        if name not in _SHALLOW_FILTERS:
            for arg in (*args, *kwargs.values()):
                _check_nested(arg)
        if name == "join" and len(args) >= 3:
            _check_size(_size(args[1]) * _size(args[2]))
        if name in _NUMBER_FILTERS:
            _check_numbers((*args, *kwargs.values()))
        if name == "replace" and len(args) >= 4 and all(isinstance(arg, str) for arg in args[1:4]):
            _check_size(len(args[1]) + args[1].count(args[2]) * len(args[3]))
        return function(*args, **kwargs)

    return wrapped


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    if _WIDE_PERCENT.search(str(text)):
        raise SecurityError("the template uses a format that is too wide")
    return str(text) % (kwargs or args)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize as transformers does: models are trained on exactly this spacing."""
    _check_numbers((indent,))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
