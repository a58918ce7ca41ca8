"""aiperf: a streamed run on each API that it knows and this server has."""

from __future__ import annotations

import json

from tests.clients.features import MODEL, URL, Features
from tests.clients.programs.command import DIRECTORY, MODEL_PATH, run

REQUESTS = 10
features = Features(deadline=300)


def register(kind: str) -> None:
    @features.case(f"{REQUESTS} streams: {kind}")
    def profile() -> None:
        output = DIRECTORY / f"out-{kind}"
        arguments = f"--model {MODEL} --url {URL} --endpoint-type {kind} --streaming --tokenizer {MODEL_PATH}"
        arguments += f" --request-count {REQUESTS} --concurrency 4 --isl 32 --osl 12 --ui none"
        arguments += f" --output-artifact-dir {output}"
        # With the variable, aiperf takes the path of a tokenizer for the name of a repository.
        run("aiperf", "profile", *arguments.split(), without="HF_HUB_OFFLINE")
        found = json.loads((output / "profile_export_aiperf.json").read_text())
        assert found["request_count"]["avg"] == REQUESTS, found["request_count"]
        assert found["time_to_first_token"]["avg"] > 0
        assert not found.get("error_summary"), found["error_summary"]


for each in ("chat", "completions", "responses"):
    register(each)

if __name__ == "__main__":
    features.run()
