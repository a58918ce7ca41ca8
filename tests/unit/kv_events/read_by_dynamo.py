"""Feeds what a node publishes to Dynamo's KV indexer, and records the batches and what it finds then.

    pip install ai-dynamo-runtime    # in a virtual environment of its own
    DYNAMO/bin/python -m dynamo.indexer --port 8090 --threads 1
    python -m tests.unit.kv_events.read_by_dynamo http://127.0.0.1:8090 "ai-dynamo-runtime 1.6.1"

It writes dynamo_reading.json, which test_foreign_readers.py compares with what is published now.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import zmq

from common.kv_cache.block_hashes import token_bytes
from common.kv_events.published_blocks import Adopted, CacheChange, Evicted, PublishedBlocks
from common.kv_events.wire import CPU, GPU, Batch, encode

RECORDED = Path(__file__).parent / "dynamo_reading.json"
BLOCK = 4
PROMPT, SALTED, PICTURE = list(range(100, 112)), list(range(200, 208)), list(range(300, 312))
# A prompt without images that begins like the one whose sixth position is an image's.
TEXT = [*PICTURE[:BLOCK], *range(400, 404)]
PROMPTS = {"prompt": PROMPT, "salted": SALTED, "picture": PICTURE, "text": TEXT}


def adopted(
    tokens: list[int],
    pages: list[int],
    first: int = 0,
    *,
    medium: str = GPU,
    salt: bytes = b"",
    plain: int = 99,
) -> Adopted:
    return Adopted(medium, BLOCK, salt, token_bytes(tokens), min(plain, len(tokens)), first, tuple(pages))


CHANGES: dict[str, CacheChange] = {
    "two blocks of the prompt": adopted(PROMPT[: 2 * BLOCK], [1, 2]),
    "its third block": adopted(PROMPT, [3], 2),
    "a prompt with a salt": adopted(SALTED, [4, 5], salt=b"secret"),
    "a prompt with an image": adopted(PICTURE, [6, 7, 8], plain=5),
    "text that begins alike": adopted(TEXT, [9], 1),
    "the prompt in host memory": adopted(PROMPT, [1, 2, 3], medium=CPU),
    "its third block is evicted": Evicted(GPU, (3,)),
    "all of it is evicted": Evicted(GPU, (1, 2)),
    "host memory is empty": Evicted(CPU, (1, 2, 3)),
    "the rest is gone": Evicted(GPU, (4, 5, 6, 7, 8, 9)),
}


def payloads() -> dict[str, bytes]:
    """Return the batch that is published for each change."""
    blocks = PublishedBlocks(BLOCK, token_ids=True)
    return {
        name: encode(Batch(float(number), blocks.apply(change), 0))
        for number, (name, change) in enumerate(CHANGES.items())
    }


class Indexer:
    """One worker of a model, registered with Dynamo's indexer."""

    def __init__(self, url: str, endpoint: str) -> None:
        self._url, self._model = url, f"tandem-{time.time():.0f}"
        worker = {"instance_id": 1, "endpoint": endpoint, "model_name": self._model, "block_size": BLOCK}
        self._post("/register", worker)

    def found(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a prompt that are cached on the device, and there or in host memory."""
        answer = self._post("/query", {"token_ids": tokens, "model_name": self._model})
        instance = answer["instances"].get("1", {"gpu": 0, "cpu": 0})
        return [instance["gpu"], instance["cpu"]]

    def _post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)


def main(url: str, version: str) -> None:
    """Publish all batches, ask for every prompt after each, and write the record."""
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.PUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        indexer = Indexer(url, f"tcp://127.0.0.1:{port}")
        time.sleep(1)  # until it has subscribed
        steps = {}
        for sequence, (name, payload) in enumerate(payloads().items()):
            publisher.send_multipart((b"kv@prefill-0@tiny", sequence.to_bytes(8, "big"), payload))
            time.sleep(0.5)
            found = {prompt: indexer.found(tokens) for prompt, tokens in PROMPTS.items()}
            steps[name] = {"payload": payload.hex(), "found": found}
    RECORDED.write_text(json.dumps({"reader": version, "steps": steps}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
