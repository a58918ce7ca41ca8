"""Arithmetic expressions of word problems and of plain questions, and the calculator that evaluates them."""

from __future__ import annotations

import ast
import random
from fractions import Fraction

from deploy.tiny_models.templates import LARGEST
from deploy.tiny_models.word_problems import Problem

# Per template of `templates`: the expression over the operands of the lines of its answer, a0 op b0 = ..., a1 op b1 ...
_EXPRESSIONS = {
    "bags": "{a0}*{b0}-{b1}",
    "share": "({a0}+{b0})/{b1}",
    "cost": "{a3}-({a0}*{b0}+{a1}*{b1})",
    "compare": "{a0}+({a0}+{b0})+({a0}+{b0}-{b1})",
    "times": "{a0}*{b0}+{a0}-{b2}",
    "week": "{a0}*7-{b1}+{b2}",
    "rows": "({a0}*{b0}-{b1})/{b2}",
    "age": "{a0}+{b0}-{b1}+{b2}",
    "bus": "{a0}-{b0}+{b1}-{b2}",
    "half": "{a0}/2+{b1}",
}
MAX_LENGTH = 200  # characters of an expression that the calculator takes
MAX_OPERAND = 9999  # largest operand of a plain question
WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}


def expression_of(problem: Problem) -> str:
    """Return the problem as one expression of the numbers in its question."""
    operands = {}
    for index, line in enumerate(problem.answer.splitlines()[:-1]):
        operands[f"a{index}"], _, operands[f"b{index}"] = line.split(" = ")[0].split()
    return _EXPRESSIONS[problem.template].format(**operands)


def drawn(rng: random.Random) -> str:
    """Draw an expression with one to three operators whose value is a whole number that is not negative."""
    while True:
        text = _drawn(rng)
        value = evaluate(text)
        if value is not None and value.denominator == 1 and 0 <= value <= 10 * MAX_OPERAND:
            return text


def _drawn(rng: random.Random) -> str:
    count = rng.choices((1, 2, 3), (0.7, 0.2, 0.1))[0]
    if count == 1 and rng.random() < 0.25:
        divisor = rng.randint(2, 99)
        return f"{divisor * rng.randint(1, 99)}/{divisor}"
    numbers = [str(_number(rng)) for _ in range(count + 1)]
    operators = [rng.choice("+-*") for _ in range(count)]
    if count > 1 and rng.random() < 0.4:
        numbers[0], numbers[1] = f"({numbers[0]}", f"{numbers[1]})"
    return "".join(a + b for a, b in zip(numbers, [*operators, ""], strict=True))


def _number(rng: random.Random) -> int:
    return rng.randint(0, 10 ** rng.randint(1, len(str(MAX_OPERAND))) - 1)


def small(rng: random.Random) -> str:
    """Draw one operation on numbers that the model can compute itself, as in the answers of word problems."""
    operator = rng.choices("+-*/", (0.3, 0.4, 0.15, 0.15))[0]
    if operator == "*":
        a = rng.randint(1, 30)
        return f"{a}*{rng.randint(1, LARGEST // a)}"
    if operator == "/":
        b = rng.randint(2, 10)
        return f"{b * rng.randint(1, LARGEST // b)}/{b}"
    a = rng.randint(0, LARGEST)
    return f"{a}+{rng.randint(0, LARGEST - a)}" if operator == "+" else f"{a}-{rng.randint(0, a)}"


def spaced(text: str) -> str:
    """Return the expression with blanks around its operators."""
    return "".join(f" {mark} " if mark in WORDS else mark for mark in text)


def in_words(text: str) -> str:
    """Return the expression with words for its operators."""
    return "".join(f" {WORDS[mark]} " if mark in WORDS else mark for mark in text)


def evaluate(text: str) -> Fraction | None:
    """Return the value of an expression; None if it is none, or has no value."""
    if len(text) > MAX_LENGTH:
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value):
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left) / _value(right)
    raise ValueError(f"{ast.dump(node)[:100]} is not arithmetic")


def shown(value: Fraction) -> str:
    """Return a value as a calculator shows it."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"
