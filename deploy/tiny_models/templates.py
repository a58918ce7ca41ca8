"""The catalogue of word problems: ten templates with two wordings each, as question and answer steps."""

from __future__ import annotations

import random
from collections.abc import Callable

Step = tuple[int, str, int]  # (a, operator, b)
Template = Callable[[random.Random, bool], tuple[str, list[Step]]]  # (rng, use the second wording)

LARGEST = 199

NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Kira", "Liam",
    "Maria", "Noah", "Olga", "Paul", "Quinn", "Rosa", "Sam", "Tina", "Umar", "Vera", "Will", "Zoe",
)  # fmt: skip

OBJECTS = (
    "apples", "books", "coins", "marbles", "pens", "stickers", "cards", "shells", "cookies", "oranges",
    "balls", "stamps", "beads", "candies", "pears", "flowers", "stones", "buttons", "pencils", "eggs",
)  # fmt: skip

# Every name and object follows a space (never the start of a line or a quote): the tokenizer has different ids for a
# word with and without the space, and a model cannot copy a name whose id changed.


def _people(rng: random.Random, count: int) -> list[str]:
    return rng.sample(NAMES, count)


def _bags(rng: random.Random, second: bool) -> tuple[str, list[Step]]:
    a, b = _people(rng, 2)
    thing = rng.choice(OBJECTS)
    bags, each = rng.randint(2, 14), rng.randint(2, 14)
    gone = rng.randint(1, bags * each)
    steps = [(bags, "*", each), (bags * each, "-", gone)]
    if second:
        text = (
            f"There are {each} {thing} in every bag and {a} owns {bags} bags. "
            f"Then {b} takes {gone} {thing} away."
        )
        return f"{text} How many {thing} are left?", steps
    text = f"{a} has {bags} bags with {each} {thing} in each bag. {a} gives {gone} {thing} to {b}."
    return f"{text} How many {thing} does {a} have now?", steps


def _share(rng: random.Random, second: bool) -> tuple[str, list[Step]]:
    a, b = _people(rng, 2)
    thing = rng.choice(OBJECTS)
    friends, part = rng.randint(2, 10), rng.randint(2, 19)
    total = friends * part
    mine = rng.randint(1, total - 1)
    steps = [(mine, "+", total - mine), (total, "/", friends)]
    if second:
        text = (
            f"{a} finds {mine} {thing} and {b} finds {total - mine}. "
            f"They put all the {thing} into {friends} equal boxes."
        )
        return f"{text} How many {thing} are in one box?", steps
    text = (
        f"{a} has {mine} {thing} and {b} has {total - mine} {thing}. "
        f"They share them equally among {friends} friends."
    )
    return f"{text} How many {thing} does each friend get?", steps


def _cost(rng: random.Random, second: bool) -> tuple[str, list[Step]]:
    (a,) = _people(rng, 1)
    one, other = rng.sample(OBJECTS, 2)
    n1, p1, n2, p2 = (rng.randint(2, 9) for _ in range(4))
    cost = n1 * p1 + n2 * p2
    paid = rng.randint(cost, LARGEST)
    steps = [(n1, "*", p1), (n2, "*", p2), (n1 * p1, "+", n2 * p2), (paid, "-", cost)]
    if second:
        text = (
            f"In a shop {one} cost {p1} dollars each and {other} cost {p2} dollars each. With {paid} dollars"
        )
        return f"{text} {a} buys {n1} {one} and {n2} {other}. How many dollars are left?", steps
    text = f"{a} buys {n1} {one} for {p1} dollars each and {n2} {other} for {p2} dollars each."
    return f"{text} {a} pays with {paid} dollars. How much change does {a} get?", steps


def _compare(rng: random.Random, second: bool) -> tuple[str, list[Step]]:
    a, b, c = _people(rng, 3)
    thing = rng.choice(OBJECTS)
    first, more = rng.randint(2, 50), rng.randint(1, 24)
    middle = first + more
    fewer = rng.randint(1, middle)
    last = middle - fewer
    steps = [(first, "+", more), (middle, "-", fewer), (first, "+", middle), (first + middle, "+", last)]
    if second:
        text = (
            f"{b} owns {more} more {thing} than {a}, and {c} owns {fewer} fewer {thing} than {b}. "
            f"{a} owns {first}."
        )
        return f"{text} How many {thing} do all three own together?", steps
    text = (
        f"{a} has {first} {thing}. {b} has {more} more {thing} than {a}. "
        f"{c} has {fewer} fewer {thing} than {b}."
    )
    return f"{text} How many {thing} do all three have in total?", steps


def _times(rng: random.Random, second: bool) -> tuple[str, list[Step]]:
    a, b = _people(rng, 2)
    thing = rng.choice(OBJECTS)
    factor = rng.randint(2, 9)
    first = rng.randint(2, LARGEST // (factor + 1))
    total = first * factor + first
    lost = rng.randint(1, total)
    steps = [(first, "*", factor), (first * factor, "+", first), (total, "-", lost)]
    if second:
        text = (
            f"{b} collects {factor} times as many {thing} as {a}, who collects {first}. "
            f"They lose {lost} of the {thing}."
        )
        return f"{text} How many {thing} remain?", steps
    text = f"{a} has {first} {thing}. {b} has {factor} times as many. Together they sell {lost} {thing}."
    return f"{text} How many {thing} do they have left?", steps


def _week(rng: random.Random, second: bool) -> tuple[str, list[Step]]:
    a, b = _people(rng, 2)
    thing = rng.choice(OBJECTS)
    each = rng.randint(2, 24)
    made = 7 * each
    given = rng.randint(1, made)
    bought = rng.randint(1, min(60, LARGEST - made + given))
    steps = [(each, "*", 7), (made, "-", given), (made - given, "+", bought)]
    if second:
        text = (
            f"Every day of one week {a} packs {each} {thing}. "
            f"{b} takes {given} of them and brings {bought} new ones."
        )
        return f"{text} How many {thing} are there now?", steps
    text = (
        f"{a} collects {each} {thing} every day for a week, "
        f"then gives {given} {thing} to {b} and buys {bought} more."
    )
    return f"{text} How many {thing} does {a} have?", steps


def _rows(rng: random.Random, second: bool) -> tuple[str, list[Step]]:
    (a,) = _people(rng, 1)
    thing = rng.choice(OBJECTS)
    while True:
        rows, each, groups = rng.randint(2, 14), rng.randint(2, 14), rng.randint(2, 9)
        if rows * each > groups:
            break
    part = rng.randint(1, (rows * each - 1) // groups)
    broken = rows * each - part * groups
    steps = [(rows, "*", each), (rows * each, "-", broken), (part * groups, "/", groups)]
    if second:
        text = (
            f"A table has {rows} rows of {each} {thing}. After {broken} {thing} are removed, "
            f"{a} makes {groups} equal piles."
        )
        return f"{text} How many {thing} are in a pile?", steps
    text = f"{a} puts {thing} into {rows} rows with {each} in each row. Then {broken} of them break."
    return f"{text} The rest go into {groups} equal boxes. How many {thing} are in each box?", steps


def _age(rng: random.Random, second: bool) -> tuple[str, list[Step]]:
    a, b, c = _people(rng, 3)
    age, older = rng.randint(3, 70), rng.randint(1, 40)
    younger, years = rng.randint(1, age + older), rng.randint(1, 30)
    steps = [(age, "+", older), (age + older, "-", younger), (age + older - younger, "+", years)]
    if second:
        text = (
            f"{c} is {younger} years younger than {b}, and {b} is {older} years older than {a}. "
            f"{a} is {age} years old."
        )
        return f"{text} What will be the age of {c} in {years} years?", steps
    text = (
        f"{a} is {age} years old. {b} is {older} years older than {a}. "
        f"{c} is {younger} years younger than {b}."
    )
    return f"{text} How old will {c} be in {years} years?", steps


def _bus(rng: random.Random, second: bool) -> tuple[str, list[Step]]:
    (a,) = _people(rng, 1)
    start = rng.randint(5, 120)
    off = rng.randint(1, start)
    on = rng.randint(1, 70)
    then = rng.randint(1, start - off + on)
    steps = [(start, "-", off), (start - off, "+", on), (start - off + on, "-", then)]
    if second:
        text = (
            f"{a} drives a train with {start} people. {off} people leave, {on} people enter, "
            f"and later {then} people leave."
        )
        return f"{text} How many people are still on the train?", steps
    text = f"A bus has {start} people on it. At the first stop {off} get off and {on} get on."
    return f"{text} At the next stop {a} sees {then} people get off. How many people are on the bus?", steps


def _half(rng: random.Random, second: bool) -> tuple[str, list[Step]]:
    a, b = _people(rng, 2)
    thing = rng.choice(OBJECTS)
    kept = rng.randint(1, LARGEST // 2)
    found = rng.randint(1, LARGEST - kept)
    steps = [(2 * kept, "/", 2), (kept, "+", found)]
    if second:
        text = (
            f"Half of the {2 * kept} {thing} in a jar belong to {a}, the rest to {b}. "
            f"Then {a} finds {found} more."
        )
        return f"{text} How many {thing} belong to {a}?", steps
    text = f"{a} has {2 * kept} {thing} and gives half of them to {b}. Then {a} buys {found} {thing}."
    return f"{text} How many {thing} does {a} have?", steps


TEMPLATES: dict[str, Template] = {
    "bags": _bags,
    "share": _share,
    "cost": _cost,
    "compare": _compare,
    "times": _times,
    "week": _week,
    "rows": _rows,
    "age": _age,
    "bus": _bus,
    "half": _half,
}
