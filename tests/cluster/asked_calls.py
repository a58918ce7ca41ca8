"""Chats with tools for the tiny model that calls them, and what is right or wrong about the answers of a cluster."""

from __future__ import annotations

import copy
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import jsonschema_rs
import msgspec

from common.checkpoint.model_config import ModelConfig
from common.config import load_cluster
from common.observability.logs import Log
from deploy.tiny_models.tool_calls.chat_form import CALL, CALL_END, THINK_END, messages
from deploy.tiny_models.tool_calls.conversations import exam
from router.answers.chat_answer import ChatAnswer
from router.from_config import answer_style
from router.grammar.grammar_work import GrammarWork
from router.requests.chat_rules import check_chat
from router.requests.openai_schema import ChatRequest
from router.tokens.tokenizer import Tokenizer
from tests.cluster.constrained_answers import Answered, Config
from tests.cluster.harness import ROOT
from tests.cluster.masked_reference import MaskedReference, Question

SAID = 160  # tokens per answer
CHOICES = ("auto", "strict", "required", "named")
_CALL = re.compile(rf"{CALL}\s*(.*?)\s*{CALL_END}", re.DOTALL)
Called = tuple[str, Any]  # name and arguments


@dataclass(frozen=True)
class AskedChat:
    """A request and its name, such as `call/17`, which `--only` takes."""

    name: str
    choice: str  # one of CHOICES
    body: Config

    @property
    def forced(self) -> bool:
        return self.choice in ("required", "named")

    async def post(self, session: aiohttp.ClientSession) -> Answered:
        """Return the complete answer; that of a stream is put together."""
        async with session.post("/v1/chat/completions", json=self.body) as response:
            if response.status != 200 or not self.body.get("stream"):
                return response.status, await response.json()
            events = [line[6:] async for line in response.content if line.startswith(b"data: ")]
        if not events or events[-1].strip() != b"[DONE]":
            return 500, {"error": "the stream has no end"}
        return put_together([json.loads(event) for event in events[:-1]])

    def defect(self, calls: Sequence[Called], written: Sequence[Called] | None) -> str:
        """Return what is wrong with the calls of a complete answer; `written`: those in the text of its tokens."""
        if written is not None:
            kept = written if self.body["parallel_tool_calls"] else written[:1]
            if list(calls) != list(kept):
                return f"the answer has the calls {calls}, its text {kept}"
        if self.choice == "auto":
            return ""
        if self.forced and not calls:
            return "no call"
        schemas = {
            tool["function"]["name"]: tool["function"]["parameters"] for tool in self.body.get("tools", [])
        }
        if self.choice == "named":
            name = self.body["tool_choice"]["function"]["name"]
            schemas = {name: schemas[name]}
        for name, arguments in calls:
            if name not in schemas or not jsonschema_rs.is_valid(schemas[name], arguments):
                return f"no tool takes {name}({arguments})"
        return ""


def put_together(events: Sequence[Config]) -> Answered:
    """Return the answer that the deltas of a stream make."""
    message: Config = {"content": "", "reasoning_content": "", "tool_calls": []}
    whole: Config = {"message": message, "token_ids": [], "finish_reason": None}
    answer: Config = {"choices": [whole]}
    for event in events:
        if "error" in event:
            return 500, event
        if event.get("prompt_token_ids") is not None:
            answer["prompt_token_ids"] = event["prompt_token_ids"]
        for choice in event["choices"]:
            whole["token_ids"] += choice.get("token_ids") or ()
            whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key) or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
                function = message["tool_calls"][call["index"]]["function"]
                for key in function:
                    function[key] += call["function"].get(key) or ""
    return 200, answer


def asked_chats(name: str) -> list[AskedChat]:
    """Return the greedy and the seeded, streamed request of a conversation, always the same."""
    number = int(name.removeprefix("call/"))
    draw, (conversation,) = random.Random(name), exam(1, number)
    tools = copy.deepcopy(conversation.declarations)
    choice = draw.choice(CHOICES) if tools else "auto"
    answered = conversation.exchange.calls and choice in ("auto", "strict") and draw.random() < 0.25
    body: Config = {
        "messages": messages(conversation, "results" if answered else "question"),
        "max_tokens": SAID,
        "parallel_tool_calls": draw.random() < 0.75,
        "return_token_ids": True,
    }
    if tools:
        body["tools"] = tools
    if choice == "strict":
        for tool in tools:
            tool["function"]["strict"] = True
    elif choice == "required":
        body["tool_choice"] = choice
    elif choice == "named":
        function = {"name": draw.choice(tools)["function"]["name"]}
        body["tool_choice"] = {"type": "function", "function": function}
    if draw.random() < 0.25:
        body["chat_template_kwargs"] = {"enable_thinking": False}
    if draw.random() < 0.5:
        body["thinking_token_budget"] = draw.randint(0, 12)
    seeded = {"temperature": 1.0, "seed": draw.getrandbits(62), "stream": True}
    return [AskedChat(name, choice, body | more) for more in ({"temperature": 0.0, "seed": 0}, seeded)]


COUNTED = ("answers", "tokens", "calls", "cut_off", "invalid", "wrong", "near_ties", "errors")


@dataclass
class Judge:
    """Counts the answers of one cluster."""

    reference: MaskedReference
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTED, 0)))
    first_problem: str = ""

    def __post_init__(self) -> None:
        resolved = load_cluster(ROOT / "deploy" / "clusters" / "local-tools.yaml", environ={})
        self._tokenizer = Tokenizer(resolved.model_path)
        self._style = answer_style(resolved, self._tokenizer, Log("check_tool_calls"))
        self._grammars, config = GrammarWork(self._tokenizer), ModelConfig.load(resolved.model_path)
        self._vocab = config.vocab_size, config.eos_token_ids
        self._grammars.prepare(*self._vocab)

    def judge(self, asked: AskedChat, status: int, answer: Config) -> None:
        """Count an answer: whether its calls are those of its text and valid, and whether the reference draws it."""
        if status != 200:
            self._problem("errors", asked, json.dumps(answer)[:300])
            return
        (choice,) = answer["choices"]
        ids, finish, message = choice["token_ids"], choice["finish_reason"], choice["message"]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        self.counts.update(answers=1, tokens=len(ids), calls=len(functions))
        if finish == "length":
            self.counts["cut_off"] += 1
        elif defect := self._defect(asked, functions, ids):
            self._problem("invalid", asked, defect)
        question = self._question(asked, answer["prompt_token_ids"])
        difference = self.reference.difference(question, ids, finish)
        if difference is not None:
            self._problem("near_ties" if difference.near_tie else "wrong", asked, str(difference))

    def _defect(self, asked: AskedChat, functions: Sequence[Config], ids: Sequence[int]) -> str:
        try:
            calls = [(each["name"], json.loads(each["arguments"])) for each in functions]
        except ValueError:
            return f"arguments that are not JSON: {functions}"
        return asked.defect(calls, self._written(ids))

    def _written(self, ids: Sequence[int]) -> list[Called] | None:
        """Return the calls in the text of tokens; None if one cannot be parsed, as may happen in free answers."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        try:
            found = [json.loads(each) for each in _CALL.findall(text.rpartition(THINK_END)[2])]
            return [(each["name"], each["arguments"]) for each in found]
        except (ValueError, LookupError, TypeError):
            return None

    def _question(self, asked: AskedChat, prompt: list[int]) -> Question:
        rules = check_chat(msgspec.convert(asked.body, ChatRequest), self._style)
        expected = ChatAnswer(rules, self._style, prompt, self._tokenizer)
        constraint = expected.constraint(None)
        grammar = None if constraint is None else self._grammars.compile(constraint, *self._vocab)
        temperature, seed = asked.body["temperature"], asked.body["seed"]
        thinking = expected.thinking_limit()
        return Question(prompt, {}, temperature, seed, SAID, grammar, thinking)

    def _problem(self, kind: str, asked: AskedChat, told: str) -> None:
        self.counts[kind] += 1
        if not self.first_problem:
            how = "streamed" if asked.body.get("stream") else "whole"
            self.first_problem = f"{kind} {asked.name} {asked.choice}, {how}: {told}"
