"""What a script runs inside a client's environment: features one after another, each with a deadline.

It needs nothing but the standard library, because the environment holds the client and its dependencies only. Results
are appended to a file as lines of JSON, so that they survive a script that hangs or dies.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

DEADLINE = 240  # seconds for one feature, on a busy machine

URL = os.environ.get("CLIENTS_URL", "")
V1 = f"{URL}/v1"
MODEL = os.environ.get("CLIENTS_MODEL", "")
QUESTION = os.environ.get("CLIENTS_QUESTION", "")  # the model knows the answer
VALUE = os.environ.get("CLIENTS_VALUE", "")
REPORT = os.environ.get("CLIENTS_REPORT", "")
PROMPT = QUESTION[: len(QUESTION) // 2]  # a text that the model continues
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
KEY = "none"
# The model was trained to write calls and no other JSON: it would fill a constrained answer with the blanks that JSON
# allows, and objects of any form with ever more members.
PENALTY = 0.2
STRONG_PENALTY = 2.0

Case = TypeVar("Case", bound=Callable[[], Any])

# A grammar enforces the arguments, so each value is an enum or a small number: the model was not trained to call.
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
# This API has no penalties: llguidance's own keyword leaves no room for blanks.
COMPACT = {**PARAMETERS, "x-guidance": {"whitespace_flexible": False}}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather of a city", "parameters": PARAMETERS},
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "enum": ["UTC"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "weather"}}


# The model was trained to call this tool and to say what it returns.
PRODUCT = "What is 12 * 7?"
RESULT = "84"
EXPRESSION: dict[str, Any] = {
    "type": "object",
    "properties": {"expression": {"type": "string", "description": "the arithmetic expression"}},
    "required": ["expression"],
}
ABOUT = "Evaluates an arithmetic expression."
CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {"name": "calculator", "description": ABOUT, "parameters": EXPRESSION},
}


def is_product(name: str, arguments: str | dict[str, Any]) -> None:
    """Check the call that answers PRODUCT."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "calculator", name
    assert found == {"expression": "12*7"}, found


def says_product(text: str | None) -> None:
    """Check the answer to PRODUCT that follows the tool's RESULT."""
    assert text, "no text"
    assert RESULT in text, f"wrong answer: {text!r}"


def solved(text: str | None) -> None:
    """Check that the text is the model's answer to QUESTION."""
    assert text, "no text"
    assert text.rstrip().endswith(f"#### {VALUE}"), f"wrong answer: {text!r}"


def is_weather(arguments: str | dict[str, Any], closed: bool = True) -> None:
    """Check the arguments of a call of `weather`, or an object of PARAMETERS.

    `closed`: the client sends `additionalProperties`, so that there are no others.
    """
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(found) == {"city", "days"} if closed else {"city", "days"} <= set(found), found
    assert found["city"] in ("Paris", "Oslo"), found
    assert found["days"] in range(1, 8), found


def is_call(name: str, arguments: str | dict[str, Any], closed: bool = True) -> None:
    """Check a call of one of TOOLS. `closed` as for `is_weather`."""
    if name == "weather":
        is_weather(arguments, closed)
        return
    assert name == "clock", name
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert found == {"zone": "UTC"} if closed else found["zone"] == "UTC", found


class Features:
    """Runs the features of one client in the order of their definition."""

    def __init__(self, deadline: int = DEADLINE) -> None:
        """`deadline`: seconds for one feature."""
        self._deadline = deadline
        self._cases: list[tuple[str, Callable[[], Any]]] = []

    def case(self, name: str) -> Callable[[Case], Case]:
        """Register a function, or coroutine function, that raises an exception if the feature does not work."""

        def register(case: Case) -> Case:
            self._cases.append((name, case))
            return case

        return register

    def run(self) -> None:
        signal.signal(signal.SIGALRM, _late)
        for name, case in self._cases:
            signal.alarm(self._deadline)
            why = ""
            try:
                result = case()
                if inspect.iscoroutine(result):
                    asyncio.run(result)
            except BaseException as error:
                why = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            finally:
                signal.alarm(0)
            report(name, not why, why)


def report(feature: str, passed: bool, why: str = "") -> None:
    """Append one result to the report."""
    with open(REPORT, "a") as file:
        file.write(json.dumps({"feature": feature, "passed": passed, "why": why}) + "\n")


def _late(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("the feature's deadline is over")
