"""The project's own source as data: modules, their syntax trees, and who imports whom."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "kv_transfer", "prefill_node", "decode_node", "router", "deploy")


@dataclass(frozen=True)
class Import:
    """One `import` statement, per module that it loads."""

    target: str  # dotted name as written, absolute
    line: int
    scope: str  # enclosing function, "" at module level
    type_checking: bool  # under `if TYPE_CHECKING:`, so that it never runs


@dataclass(frozen=True)
class Module:
    name: str
    place: str  # path relative to the repository root
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.place)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, in the order of `ast.walk`, which takes longer than most of its users."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[Import]:
        package = self.name if self.place.endswith("__init__.py") else self.name.rpartition(".")[0]
        return list(_imports(self.tree, package, "", False))


def _imports(node: ast.AST, package: str, scope: str, type_checking: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, scope, type_checking)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                parent = package.split(".")[: len(package.split(".")) - child.level + 1]
                base = ".".join([*parent, base] if base else parent)
            for alias in child.names:  # `from a import b`: b may be a module of a
                yield Import(f"{base}.{alias.name}", child.lineno, scope, type_checking)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{scope}.{child.name}" if scope else child.name
            yield from _imports(child, package, name, type_checking)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for statement in child.body:
                yield from _imports(ast.Module(body=[statement], type_ignores=[]), package, scope, True)
            for statement in child.orelse:
                yield from _imports(
                    ast.Module(body=[statement], type_ignores=[]), package, scope, type_checking
                )
        elif not isinstance(child, ast.expr):  # no expression contains an import
            yield from _imports(child, package, scope, type_checking)


def modules(packages: Iterable[str] = PACKAGES) -> list[Module]:
    """Return every module of the given top-level packages. Tests of one process share their syntax trees."""
    return [module for package in packages for module in _modules(package)]


@cache
def _modules(package: str) -> list[Module]:
    found: list[Module] = []
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")))
    return found


def dotted(node: ast.expr) -> str | None:
    """Return the text of a name or of attributes of one, such as `torch.load`; None for other expressions."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def resolve(target: str, known: Iterable[str]) -> str | None:
    """Return the project module that `import target` loads, or None if it is not one."""
    while target:
        if target in known:
            return target
        target = target.rpartition(".")[0]
    return None


def imported(module: Module, known: dict[str, Module], *, run: bool = True) -> set[str]:
    """Return the project modules that `module` imports; with `run`, without those for type checking."""
    found = set()
    for each in module.imports:
        if run and each.type_checking:
            continue
        name = resolve(each.target, known)
        if name is not None and name != module.name:
            found.add(name)
    return found


def with_packages(name: str) -> set[str]:
    """Return a module and its parent packages, whose __init__ its import runs too."""
    parts = name.split(".")
    return {".".join(parts[: count + 1]) for count in range(len(parts))}
