"""Tests use public facts: no private attribute or function of the product, except in the files listed here."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable, Iterator

import pytest

from tests.architecture.source_tree import Module, modules

# Lines of a program, in a text of several lines.
PROGRAM = re.compile(r"^(import|from) [a-z_.]+.*\n", re.MULTILINE)
# Names with an underscore that belong to Python, torch or another library, and have no public form.
FOREIGN = {
    **dict.fromkeys(("_replace", "_fields"), "the interface of named tuples"),
    **dict.fromkeys(("_getframe", "_current_frames"), "stacks of threads, in sys"),
    "_exit": "os._exit ends a forked child without the handlers of its parent",
    **dict.fromkeys(
        ("_cdata", "_schema", "_sleep"), "identity of storages, schemas of operators, GPU delays: torch"
    ),
    **dict.fromkeys(("_patch_lang", "_get_np_dtype"), "Triton's interpreter, which tests make faster"),
    "_SSL_CONTEXT_VERIFIED": "aiohttp's default TLS context, to trust a test's own authority",
}
# Files that remove or observe what has no public form, with the reason.
EXCEPTIONS = {
    "tests/fakes/compile_for.py": "compiles every launcher, also those that only the product's dispatch calls",
    "tests/fuzz/wire_targets.py": "builds frames that the public encoders refuse to build",
    "tests/fakes/hostile_frames.py": "builds frames that the public encoders refuse to build",
    "tests/unit/kv_transfer/test_handoff_record.py": "builds records that the public encoders refuse to build",
    "tests/unit/kv_cache/test_page_allocator.py": "damages the free list, which check_integrity has to notice",
    "tests/unit/kv_cache/test_page_space_model.py": "compares every page with a model after every step",
}


def test_tests_use_public_facts() -> None:
    found = [use for module in modules(["tests"]) if module.place not in EXCEPTIONS for use in _uses(module)]
    assert not found, "use a public fact (method, counter, log line, effect on a fake):\n" + "\n".join(found)


def test_exceptions_are_used() -> None:
    used = {
        module.place for module in modules(["tests"]) if module.place in EXCEPTIONS and any(_uses(module))
    }
    assert set(EXCEPTIONS) == used, "remove what has no private access any more"


def _uses(module: Module) -> Iterator[str]:
    """Yield every use of a private name that the module does not define itself."""
    # Not `module.nodes`, which would stay in memory: no other test reads the trees of tests.
    whole = list(ast.walk(ast.parse(module.text)))
    for nodes in (whole, *(list(ast.walk(each)) for each in _programs(whole))):
        private = [(node, name) for node in nodes for name in _private_names(node)]
        own = {*_defined(nodes), *FOREIGN} if private else set()
        for node, name in private:
            if name not in own:
                yield f"{module.place}:{getattr(node, 'lineno', 0)}: {name}"


def _programs(nodes: Iterable[ast.AST]) -> Iterator[ast.Module]:
    """Yield the programs that a module holds as texts, to run them in a process of their own."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and PROGRAM.search(node.value):
            with contextlib.suppress(SyntaxError):
                yield ast.parse(node.value)


def _private_names(node: ast.AST) -> Iterator[str]:
    """Yield the private names that a node takes from an object, a module, or by a string (`setattr`)."""
    names: list[str] = []
    if isinstance(node, ast.Attribute):
        names = [node.attr] if node.attr.startswith("_") and not _is_own(node.value) else []
    elif isinstance(node, ast.ImportFrom):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.Call) and _last_name(node.func) in ("setattr", "getattr", "delattr"):
        texts = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
        names = [text.rpartition(".")[2] for text in texts if isinstance(text, str)]
    yield from (name for name in names if name.startswith("_") and not name.startswith("__"))


def _last_name(function: ast.expr) -> str:
    """Return `f` of `f` and of `x.f`."""
    return getattr(function, "attr", "") or getattr(function, "id", "")


def _is_own(value: ast.expr) -> bool:
    """Return whether the object is the class's own: `self`, `cls` or `super()`."""
    return ast.unparse(value) in ("self", "cls", "super()")


def _defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@pytest.mark.parametrize(
    "text",
    [
        "rig.sender._rooms",
        "del rig._rooms[1]",
        "from router.images.loader import _from_base64",
        "monkeypatch.setattr(graphs, '_choose', choose)",
        "monkeypatch.setattr('deploy.own_model._read', f)",
        "getattr(link, '_dealer')",
        "PROGRAM = 'import x\\nx._launch()\\n'",
    ],
)
def test_private_uses_are_found(text: str) -> None:
    assert len(list(_uses(Module("tests.x", "tests/x.py", text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def f(self, other):\n        self._x = 1\n        return other._x",
        "class A(B):\n    def f(self):\n        return super()._f() + self._g",
        "tile._replace(rows=1)",
        "made.__class__",
    ],
)
def test_what_is_a_modules_own_is_allowed(text: str) -> None:
    assert not list(_uses(Module("tests.x", "tests/x.py", text)))
