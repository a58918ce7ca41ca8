"""Draws conversations: a question, the tools that a client offers, the right calls, their results and the answer.

Everything follows from a seed. A hash of its text assigns a question to the training or the held-out split, as for word
problems.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deploy.tiny_models.prompts import system_prompt
from deploy.tiny_models.tool_calls.catalogue import NO_TOOL, SMALL_TALK, TOPICS, Topic, Value
from deploy.tiny_models.tool_calls.declarations import CALCULATOR, Tool, varied_tool
from deploy.tiny_models.tool_calls.expressions import (
    drawn,
    evaluate,
    expression_of,
    in_words,
    shown,
    small,
    spaced,
)
from deploy.tiny_models.word_problems import Split, problems, split_of

UNAIDED = "No tool helps. I compute it."
NEEDLESS = "No tool is needed."
MISSING = "No tool helps."
ANSWERED = "The tool has answered."
SEVERAL_ANSWERED = "The tools have answered."
FAILED = "The tool has failed."
PLAIN_QUESTIONS = ("What is {}?", "Calculate {}.", "Compute {}.", "How much is {}?", "Work out {}.", "{} = ?")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    tool: Tool
    arguments: dict[str, Value]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and everything up to its answer."""

    question: str
    thought: str  # before the calls, or before the answer if there are none
    answer: str
    wanted: tuple[str, ...] = ()  # what the answer must say to be right; without calls: all of it
    calls: tuple[Call, ...] = ()
    needs: tuple[str, ...] = ()  # what the thought says about each call
    results: tuple[str, ...] = ()  # the calls' results
    conclusion: str = ""  # the thought before the answer, after calls


@dataclass(frozen=True, slots=True)
class Conversation:
    """An exchange and what precedes it."""

    kind: str
    tools: tuple[Tool, ...]
    exchange: Exchange
    system: str | None = None
    earlier: tuple[Exchange, ...] = ()

    @property
    def declarations(self) -> list[dict[str, Any]]:
        """The field `tools` of a request."""
        return [tool.declaration for tool in self.tools]

    def tool(self, name: str) -> Tool | None:
        """Return the offered tool with this name."""
        return next((tool for tool in self.tools if tool.name == name), None)

    def respond(self, name: str, arguments: Any) -> str | None:
        """Return what the client's tool answers; None for a call that no tool takes."""
        tool = self.tool(name)
        if tool is None or not tool.takes(arguments):
            return None
        for call, result in zip(self.exchange.calls, self.exchange.results, strict=True):
            if (call.tool.name, call.arguments) == (name, arguments):
                return result
        value = evaluate(str(arguments[tool.keys[0]])) if tool.topic is CALCULATOR else None
        return "nothing found" if value is None else shown(value)

    def is_right(self, answer: str) -> bool:
        """Return whether an answer says what it must."""
        if not self.exchange.calls:
            return answer.strip().endswith(self.exchange.wanted[0])
        return all(f"is {wanted}." in answer for wanted in self.exchange.wanted)


@dataclass(frozen=True, slots=True)
class _Asked:
    """One thing that is asked, and the call that answers it."""

    question: str
    need: str  # what the thought says about it
    call: Call
    value: str  # what the answer says
    result: str  # what the tool returns
    answer: str


class Conversations:
    """An endless source of conversations of one seed and split."""

    def __init__(self, seed: int, split: Split) -> None:
        self._rng = random.Random(f"conversations/{seed}/{split}")
        self._problems = problems(seed, split)
        self._split = split

    def draw(self, kinds: Sequence[str], weights: Sequence[float]) -> Conversation:
        """Draw one conversation without earlier exchanges."""
        (kind,) = self._rng.choices(kinds, weights)
        make: Callable[[], tuple[Sequence[Tool], Exchange]] = getattr(self, f"_{kind}")
        while True:
            tools, exchange = make()
            names = {tool.name for tool in tools}
            if len(names) == len(tools) and (
                exchange.question in SMALL_TALK or split_of(exchange.question) == self._split
            ):
                break
        shuffled = list(tools)
        self._rng.shuffle(shuffled)
        return Conversation(kind, tuple(shuffled), exchange, self._system())

    def after(self, last: Conversation, count: int) -> Conversation:
        """Put exchanges with the same tools, or without one, before the last one of a conversation."""
        earlier = []
        for _ in range(count):
            if last.tools and self._rng.random() < 0.6:
                earlier.append(self._asked_of(last.tools))
            else:
                earlier.append(self._talk())
        return replace(last, earlier=tuple(earlier))

    def _system(self) -> str | None:
        draw = self._rng.random()
        if draw < 0.6:
            return None
        return (
            "You are a helpful assistant."
            if draw < 0.75
            else system_prompt(self._rng, self._rng.randint(1, 3))
        )

    # kinds: each returns the tools that are offered and the exchange

    def _problem(self) -> tuple[list[Tool], Exchange]:
        problem = next(self._problems)
        tool = varied_tool(self._rng, CALCULATOR)
        text = expression_of(problem)
        asked = self._calculation(tool, text, problem.question)
        exchange = self._with_calls(
            [replace(asked, answer=f"The answer is {asked.value}.")], problem.question
        )
        return [tool, *self._others([CALCULATOR])], exchange

    def _arithmetic(self) -> tuple[list[Tool], Exchange]:
        tool = varied_tool(self._rng, CALCULATOR)
        asked = self._plain(tool)
        return [tool, *self._others([CALCULATOR])], self._with_calls([asked], asked.question)

    def _lookup(self) -> tuple[list[Tool], Exchange]:
        topic = self._rng.choice(TOPICS)
        tool = varied_tool(self._rng, topic)
        asked = self._looked_up(tool)
        return [tool, *self._others([topic])], self._with_calls([asked], asked.question)

    def _parallel(self) -> tuple[list[Tool], Exchange]:
        rng = self._rng
        count = 2 if rng.random() < 0.85 else 3
        draw = rng.random()
        if draw < 0.45:
            tools = [varied_tool(rng, CALCULATOR)]
        elif draw < 0.75:
            tools = [varied_tool(rng, rng.choice(TOPICS))]
        else:
            tools = [varied_tool(rng, topic) for topic in rng.sample((CALCULATOR, *TOPICS), 2)]
        asked = [self._asked(tools[index % len(tools)]) for index in range(count)]
        question = self._joined(asked)
        topics = [tool.topic for tool in tools]
        return [*tools, *self._others(topics)], self._with_calls(asked, question)

    def _unaided(self) -> tuple[list[Tool], Exchange]:
        """Return a word problem or a small calculation without a calculator."""
        return self._others([CALCULATOR], least=1), self._computed()

    def _bare(self) -> tuple[list[Tool], Exchange]:
        """Return the same without tools."""
        return [], self._computed()

    def _small_talk(self) -> tuple[list[Tool], Exchange]:
        tools = self._others([]) if self._rng.random() < 0.7 else []
        return tools, self._talk()

    def _missing(self) -> tuple[list[Tool], Exchange]:
        """Return a question for a tool that is not offered."""
        topic = self._rng.choice(TOPICS)
        asked = self._looked_up(varied_tool(self._rng, topic))
        exchange = Exchange(asked.question, MISSING, NO_TOOL, (NO_TOOL,))
        return self._others([topic], least=self._rng.randint(0, 1)), exchange

    # parts

    def _others(self, topics: Sequence[Topic], least: int = 0) -> list[Tool]:
        """Return tools that are not needed, none of them of these topics."""
        free = [topic for topic in (CALCULATOR, *TOPICS) if topic not in topics]
        count = max(least, self._rng.choices((0, 1, 2, 3), (0.4, 0.3, 0.2, 0.1))[0])
        return [varied_tool(self._rng, topic) for topic in self._rng.sample(free, count)]

    def _asked_of(self, tools: Sequence[Tool]) -> Exchange:
        asked = self._asked(self._rng.choice(tools))
        return self._with_calls([asked], asked.question)

    def _asked(self, tool: Tool) -> _Asked:
        return self._plain(tool) if tool.topic is CALCULATOR else self._looked_up(tool)

    def _plain(self, tool: Tool) -> _Asked:
        text = drawn(self._rng)
        return self._calculation(tool, text, self._worded(text))

    def _calculation(self, tool: Tool, text: str, question: str) -> _Asked:
        found = evaluate(text)
        assert found is not None
        value = shown(found)
        forms = ("{}", "{}.0", '{{"result": {}}}', "result: {}", "= {}", "The result is {}.")
        form = self._rng.choices(forms, (10, 2, 2, 1, 1, 1))[0]
        call = Call(tool, {tool.keys[0]: text})
        return _Asked(question, text, call, value, form.format(value), f"{text} is {value}.")

    def _looked_up(self, tool: Tool) -> _Asked:
        topic, rng = tool.topic, self._rng
        values = [argument.draw(rng) for argument in topic.arguments]
        result = topic.result(rng)
        return _Asked(
            rng.choice(topic.questions).format(*values),
            f"the {topic.name}",
            Call(tool, dict(zip(tool.keys, values, strict=True))),
            result,
            result if rng.random() < 0.7 else f'{{"{topic.name}": "{result}"}}',
            topic.answer.format(*values, result=result),
        )

    def _joined(self, asked: Sequence[_Asked]) -> str:
        draw = self._rng.random()
        if draw < 0.5:
            return " ".join(each.question for each in asked)
        first, *others = [each.question for each in asked]
        return " ".join([first, *(f"And {other[0].lower()}{other[1:]}" for other in others)])

    def _with_calls(self, asked: Sequence[_Asked], question: str) -> Exchange:
        needs = tuple(f"{each.need} by {each.call.tool.name}" for each in asked)
        exchange = Exchange(
            question,
            f"I need {' and '.join(needs)}.",
            " ".join(each.answer for each in asked),
            tuple(each.value for each in asked),
            tuple(each.call for each in asked),
            needs,
            tuple(each.result for each in asked),
            ANSWERED if len(asked) == 1 else SEVERAL_ANSWERED,
        )
        return self._failed(exchange) if len(asked) == 1 and self._rng.random() < 0.02 else exchange

    def _failed(self, exchange: Exchange) -> Exchange:
        reason = self._rng.choice(("error: timeout", "error: not available", "Error 500", "error"))
        return replace(
            exchange,
            results=(reason,),
            conclusion=FAILED,
            answer=f"The answer of the tool is {reason}.",
            wanted=(reason,),
        )

    def _computed(self) -> Exchange:
        rng = self._rng
        if rng.random() < 0.75:
            problem = next(self._problems)
            return Exchange(problem.question, UNAIDED, problem.answer, (f"#### {problem.value}",))
        text = small(rng)
        value = evaluate(text)
        assert value is not None
        mark = f"#### {shown(value)}"
        return Exchange(self._worded(text), UNAIDED, f"{spaced(text)} = {shown(value)}\n{mark}", (mark,))

    def _worded(self, text: str) -> str:
        shape = self._rng.choices((str, spaced, in_words), (0.3, 0.5, 0.2))[0]
        return self._rng.choice(PLAIN_QUESTIONS).format(shape(text))

    def _talk(self) -> Exchange:
        question, answer = self._rng.choice(list(SMALL_TALK.items()))
        return Exchange(question, NEEDLESS, answer, (answer,))


KINDS = ("problem", "arithmetic", "lookup", "parallel", "unaided", "bare", "small_talk", "missing")
TRAINED = (0.26, 0.14, 0.18, 0.14, 0.05, 0.15, 0.05, 0.03)
ASKED = (0.35, 0.2, 0.2, 0.15, 0.0, 0.0, 0.05, 0.05)


def exam(count: int, seed: int) -> Iterator[Conversation]:
    """Yield held-out conversations to score."""
    source = Conversations(seed, "heldout")
    for _ in range(count):
        yield source.draw(KINDS, ASKED)
