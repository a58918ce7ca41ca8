"""Docstrings and comments use plain words, and the first line of a docstring is a complete phrase."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.architecture.source_tree import Module, modules

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# "after" (in time) or "past" (in position) says it better.
ODD_WORD = re.compile(r"\bbehind\b")
# Half a question or half a sentence: a class or a property is a thing, a function does or returns something.
HALF = re.compile(r"(Of|Whether|What|How|Who|Which|Where|When|Why|As) |The one ")
# A function is described by a verb: "Return the seconds", "Raise InvalidRequest".
NOUN = re.compile(r"(The|A|An|Raises|Like|Seconds|Number|Names) ")
# Programs of a kernel and nodes of a graph are described by what each of them does.
KERNELS = ("kernel", "kernel_with_varying", "gluon_kernel")


def odd_prose(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, first words) of the docstrings and comments that break a rule."""
    for node in module.nodes:
        if not isinstance(node, Documented) or (text := ast.get_docstring(node)) is None:
            continue
        if HALF.match(text) or ODD_WORD.search(text) or (_is_function(node) and NOUN.match(text)):
            yield node.body[0].lineno, text[:80]
    if "# Of " not in module.text and not ODD_WORD.search(module.text):
        return
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT and (
            token.string.startswith("# Of ") or ODD_WORD.search(token.string)
        ):
            yield token.start[0], token.string[:80]


def _is_function(node: ast.AST) -> bool:
    """Return whether it is called as a function, and is no property and no kernel."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    decorators = [ast.unparse(each).partition("(")[0] for each in node.decorator_list]
    return not any(each.endswith("property") or each in KERNELS for each in decorators)


def test_docstrings_and_comments_use_plain_words() -> None:
    wrong = [f"{module.place}:{line}: {text}" for module in modules() for line, text in odd_prose(module)]
    assert not wrong, "say it in a complete phrase of plain words:\n" + "\n".join(wrong)


def test_odd_prose_is_found() -> None:
    text = """'''Of pages.'''

behind = "behind"  # what lies behind


class C:
    '''What it holds.'''

    def f(self):
        '''Whether there is a page.'''

    def g(self):
        '''The page after it.'''

    @cached_property
    def page(self):
        '''The page after it.'''

    @kernel_with_varying("n")
    def h(n):
        '''The first program clears the page.'''

    async def i(self):
        '''Return whether there is a page.'''
"""
    assert sorted(odd_prose(Module("m", "m.py", text))) == [
        (1, "Of pages."),
        (3, "# what lies behind"),
        (7, "What it holds."),
        (10, "Whether there is a page."),
        (13, "The page after it."),
    ]
