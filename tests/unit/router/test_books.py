"""What clients see and what /metrics counts agree, under a random load with random faults.

Each seed has a load of its own. By default a few seeds run; with TANDEM_EXPLORE=1 a few hundred. Tokens that nodes
generated and no client got are counted, too: those past a stop string, and the one of a request for none.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.served_series import rendered
from tests.fakes.stepped_router import MemoryClient, SteppedRouter

SEEDS = range(300 if "TANDEM_EXPLORE" in os.environ else 8)
CLIENTS = 40
MODEL = {"model": "tiny"}
CHAT = {**MODEL, "messages": [{"role": "user", "content": "hi"}]}
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHATS, CHAT),
    (CHATS, {**CHAT, "n": 2}),
    (CHATS, {**CHAT, "stop": ["nn"], "n": 2}),
    (CHATS, {**CHAT, "max_tokens": 1}),
    (CHATS, {**CHAT, "tools": [TOOL]}),
    (CHATS, {**CHAT, "response_format": {"type": "json_object"}}),
    (TEXTS, {**MODEL, "prompt": [[5, 6, 7], [8, 9]], "n": 2, "max_tokens": 3}),
    (TEXTS, {**MODEL, "prompt": [5, 6, 7, 8], "max_tokens": 0, "echo": True}),
    (TEXTS, {**MODEL, "prompt": "a", "stop": "a"}),
    # Refused before they begin.
    (CHATS, {**CHAT, "temperature": -1}),
    (CHATS, {**CHAT, "max_tokens": 5000}),
    (TEXTS, {**MODEL, "prompt": [5] * 2000}),
    (TEXTS, {"model": "other", "prompt": "a"}),
]
# Every token that is generated is answered.
EXACT = [(path, body) for path, body in BODIES if "stop" not in body and body.get("max_tokens") != 0]
LOSSES = ("decode", "prefill")
FAULTS = (*LOSSES, "leave", "abort")
LEFT = ("client_gone", "sibling_failed", "aborted")  # codes that no client can see
STAGE_TIMES = ("queue_time", "prefill_time", "decode_time", "inference_time", "time_per_output_token")


class Load:
    """Clients of a router, and the faults that disturb them."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = Random(seed)
        # One load in three only loses nodes, which no client may notice; another is more than the router takes.
        self.faults: Sequence[str] = LOSSES if seed % 3 == 0 else FAULTS
        self.bodies = EXACT if self.faults is LOSSES else BODIES
        most = 6 if seed % 3 == 1 else 1000
        self.router = SteppedRouter(
            directory, router=f"max_crashes: 0, max_requests: {most}, retry_ratio: 1.0, max_attempts: 10"
        )
        self.asked: list[tuple[str, int, MemoryClient]] = []  # path, choices, client
        self.left: list[MemoryClient] = []

    def run(self) -> None:
        for _ in range(CLIENTS):
            self.ask()
            if self.random.random() < 0.4:
                self.disturb(self.random.choice(self.faults))
            for _ in range(self.random.randrange(3)):
                self.router.work(self.random.randint(1, 4))
                self.router.pass_time(0.05)
            self.router.start_missing()
        self.router.wait(lambda: all(client.over for _, _, client in self.asked))
        for _, _, client in self.asked:
            self.router.loop.run_now(client.leave)
        self.router.pass_time(4.0)

    def ask(self) -> None:
        path, body = self.random.choice(self.bodies)
        if self.random.random() < 0.5:
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        prompt = body.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], list) else 1
        client = self.router.connect()
        client.post(path, body)
        self.asked.append((path, prompts * body.get("n", 1), client))
        self.router.loop.run_for()

    def disturb(self, fault: str) -> None:
        """Let a fault happen after a few more callbacks of the loop."""
        router = self.router
        action: Callable[[], object]
        if fault == "leave":
            client = self.random.choice(self.asked)[2]
            if client.over:
                return
            self.left.append(client)
            action = client.leave
        elif fault == "abort":
            action = router.core.dispatcher.running.abort_all
        else:
            action = partial(router.lose, "decode" if fault == "decode" else "prefill")
        router.counted.after(router.counted.steps + self.random.randrange(20), action)

    def answered(self) -> Iterator[tuple[str, int, MemoryClient]]:
        """Yield what was asked by clients that stayed."""
        return (asked for asked in self.asked if asked[2] not in self.left)


def documents(client: MemoryClient) -> list[Any]:
    """Return the JSON documents of an answer."""
    head, _, body = client.received.partition(b"\r\n\r\n")
    if b"text/event-stream" not in head:
        return [json.loads(body)]
    lines = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def series(router: SteppedRouter) -> dict[tuple[str, ...], float]:
    """Return each sample by its name and the values of its labels, without model and engine of the router."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(rendered(router.core.metrics)[0].decode()):
        for sample in family.samples:
            labels = (value for key, value in sample.labels.items() if key not in ("model_name", "le"))
            found[(sample.name, *(value for value in labels if value != "router"))] = sample.value
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_the_books_balance(seed: int, tmp_path: Path) -> None:
    load = Load(tmp_path, seed)
    load.run()
    router, got = load.router, series(load.router)
    ended = {
        reason: got["vllm:request_success_total", reason] for reason in ("stop", "length", "abort", "error")
    }
    errors = {key[1]: value for key, value in got.items() if key[0] == "tandem_request_errors_total"}

    # What clients saw.
    statuses: Counter[tuple[str, str]] = Counter()
    codes: Counter[str] = Counter()
    tokens = whole = 0
    for path, choices, client in load.answered():
        statuses[path, f"{client.status // 100}xx"] += 1
        shown = documents(client)
        problems = [each["error"] for each in shown if "error" in each]
        codes.update(each["code"] or "" for each in problems)
        reasons = [
            choice["finish_reason"]
            for each in shown
            for choice in each.get("choices", ())
            if choice.get("finish_reason")
        ]
        assert problems or len(reasons) == choices
        if not problems and "abort" not in reasons:
            usage = next(each["usage"] for each in shown if each.get("usage"))
            tokens += usage["completion_tokens"]
            whole += choices
    # HTTP answers.
    http = {key[1:]: value for key, value in got.items() if key[0] == "http_requests_total"}
    for (path, status), count in statuses.items():
        assert count <= http[path, "POST", status] <= count + len(load.left)
    assert sum(http.values()) <= len(load.asked)
    # Requests that ended with an error or were aborted are among the errors, too; the others were refused. A client may
    # leave before its request has begun.
    refused = sum(errors.values()) - ended["abort"] - ended["error"]
    assert sum(ended.values()) + refused <= len(router.asked)
    for code, counted in errors.items():
        if code not in LEFT:
            assert counted >= codes[code]
    # Completed requests are in each histogram once.
    completed = ended["stop"] + ended["length"]
    histograms = {f"vllm:request_{each}_seconds_count" for each in STAGE_TIMES}
    histograms |= {"vllm:e2e_request_latency_seconds_count", "vllm:request_prompt_tokens_count"}
    histograms |= {"vllm:request_generation_tokens_count", "vllm:request_params_max_tokens_count"}
    assert {name: got[name,] for name in histograms} == dict.fromkeys(histograms, completed)
    assert completed <= got["vllm:time_to_first_token_seconds_count",] <= sum(ended.values())
    if load.faults == LOSSES and not errors:
        assert whole == completed == len(router.asked)
        assert got["vllm:request_generation_tokens_sum",] == tokens
    else:
        assert got["vllm:request_generation_tokens_sum",] >= tokens
    # Nothing is in flight.
    assert router.core.dispatcher.active == 0
    assert got["tandem_requests_waiting_for_room",] == 0
    assert not router.loop.problems
    router.close()
