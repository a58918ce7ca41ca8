"""Nobody has to pass more than eight arguments: parts that belong together have a name, as one value.

Records may have more fields. A record holds values and does nothing: see `_is_record`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source_tree import Module, modules

MAX_ARGUMENTS = 8
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Programs for the GPU, whose parameters are what a launch passes.
KERNELS = {"kernel", "kernel_with_varying", "gluon_kernel", "jit"}
# Folders of kernels: the functions that launch them, and their references, take the same tensors.
KERNEL_FOLDERS = ("common/engine/ops/", "kv_transfer/transport/cuda/")
# A parameter with one of them is an option of a command line, which no code passes.
OPTIONS = ("typer.Option(", "typer.Argument(")


def test_nobody_has_to_pass_many_arguments() -> None:
    wrong = [each for module in modules() for each in _too_many(module)]
    assert not wrong, "group what belongs together:\n" + "\n".join(wrong)


def _too_many(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if not isinstance(node, (ast.ClassDef, Function)):
            continue
        count = 0
        if isinstance(node, Function) and not _is_kernel(module, node):
            count = len(_parameters(node))
        elif isinstance(node, ast.ClassDef) and _is_dataclass(node) and not _is_record(node):
            # A field with a default is state that the object starts with.
            count = sum(field.value is None for field in _fields(node))
        if count > MAX_ARGUMENTS:
            yield f"{module.place}:{node.lineno} {node.name} takes {count} arguments"


def _parameters(function: Function) -> list[ast.arg]:
    """Return the parameters that callers pass, except `self`."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    options = [each for each in every if each.annotation and _is_option(each.annotation)]
    return [each for each in every if each.arg not in ("self", "cls") and each not in options]


def _is_option(annotation: ast.expr) -> bool:
    return any(option in ast.unparse(annotation) for option in OPTIONS)


def _is_kernel(module: Module, function: Function) -> bool:
    called = (each.func if isinstance(each, ast.Call) else each for each in function.decorator_list)
    if any(ast.unparse(each).rpartition(".")[2] in KERNELS for each in called):
        return True
    parameters = _parameters(function)
    first = parameters[0].annotation if parameters else None
    takes_tensors = first is not None and ast.unparse(first) in ("Tensor", "torch.Tensor")
    return module.place.startswith(KERNEL_FOLDERS) and takes_tensors


def _decorator(node: ast.ClassDef) -> ast.expr | None:
    """Return `dataclass` or `dataclass(...)` of a class; None for other classes."""
    for each in node.decorator_list:
        called = each.func if isinstance(each, ast.Call) else each
        if ast.unparse(called) in ("dataclass", "dataclasses.dataclass"):
            return each
    return None


def _is_dataclass(node: ast.ClassDef) -> bool:
    return _decorator(node) is not None


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    """Return the fields of a dataclass that its constructor takes."""
    found = (each for each in node.body if isinstance(each, ast.AnnAssign))
    return [each for each in found if "ClassVar" not in ast.unparse(each.annotation) and _is_taken(each)]


def _is_taken(field: ast.AnnAssign) -> bool:
    keywords = field.value.keywords if isinstance(field.value, ast.Call) else []
    return not any(each.arg == "init" and ast.unparse(each.value) == "False" for each in keywords)


def _is_record(node: ast.ClassDef) -> bool:
    """Whether a dataclass only holds values: it has no methods, or it is frozen and its methods only return values.

    Messages (msgspec.Struct) are records, too: their fields are what is sent.
    """
    methods = [each for each in node.body if isinstance(each, Function)]
    if not methods:
        return True
    decorator = _decorator(node)
    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
    frozen = any(each.arg == "frozen" and ast.unparse(each.value) == "True" for each in keywords)
    return frozen and not any(_acts(each) for each in methods)


def _acts(method: Function) -> bool:
    """Whether a method does anything but return a value: it waits, yields, assigns to parts, or calls for an effect."""
    if isinstance(method, ast.AsyncFunctionDef):
        return True
    for each in ast.walk(method):
        if isinstance(each, (ast.Await, ast.Yield, ast.YieldFrom, ast.With, ast.Delete)):
            return True
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call):
            return True
        if isinstance(each, (ast.Attribute, ast.Subscript)) and isinstance(each.ctx, ast.Store):
            return True
    return False


NINE = "\n    ".join(f"{name}: int" for name in "abcdefghi")
EIGHT_AND_MORE = NINE.replace("i: int", "i: int = 0\n    j: int = 0")
FROZEN = "@dataclass(frozen=True)\nclass C:\n    "


@pytest.mark.parametrize(
    "text",
    [
        "def f(a, b, c, d, e, f, g, h, *, i): ...",
        "async def f(a, b, c, d, e, f, g, h, i=0): ...",
        "class C:\n    def __init__(self, a, b, c, d, e, f, g, h, i): ...",
        f"@dataclass\nclass C:\n    {NINE}\n    def sum(self):\n        return self.a",
        f"{FROZEN}{NINE}\n    def act(self):\n        print(self.a)",
        f"{FROZEN}{NINE}\n    def act(self):\n        self.a[0] = 1",
        f"{FROZEN}{NINE}\n    async def act(self):\n        return 1",
    ],
)
def test_too_many_arguments_are_found(text: str) -> None:
    assert len(list(_too_many(Module("router.x", "router/x.py", text)))) == 1, text


@pytest.mark.parametrize(
    "text",
    [
        "class C:\n    def f(self, a, b, c, d, e, f, g, h): ...",
        "def f(a, b, c, d, e, f, g, h, i: Annotated[int, typer.Option(help='x')] = 0): ...",
        "@kernel_with_varying('a')\ndef f(a, b, c, d, e, f, g, h, i): ...",
        f"@dataclass\nclass C:\n    {NINE}",
        f"class C(msgspec.Struct):\n    {NINE}",
        f"{FROZEN}{NINE}\n    @property\n    def sum(self):\n        return self.a + self.b",
        f"@dataclass\nclass C:\n    {EIGHT_AND_MORE}\n    def act(self):\n        self.j += 1",
    ],
)
def test_records_kernels_and_commands_may_have_more(text: str) -> None:
    assert not list(_too_many(Module("router.x", "router/x.py", text))), text


def test_launchers_of_kernels_take_tensors_only_in_their_folders() -> None:
    text = "def f(a: Tensor, b, c, d, e, f, g, h, i): ..."
    assert not list(_too_many(Module("common.engine.ops.x", "common/engine/ops/x.py", text)))
    assert list(_too_many(Module("common.engine.x", "common/engine/x.py", text)))
