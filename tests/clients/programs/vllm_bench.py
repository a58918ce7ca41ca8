"""`vllm bench serve` with each of its backends that this server answers."""

from __future__ import annotations

import json

from tests.clients.features import MODEL, URL, Features
from tests.clients.programs.command import ANSWER_AT_ONCE, DIRECTORY, MODEL_PATH, run

PROMPTS = 10
features = Features(deadline=300)


def register(backend: str, path: str) -> None:
    @features.case(f"{PROMPTS} prompts: {backend}")
    def serve() -> None:
        arguments = f"--backend {backend} --base-url {URL} --endpoint {path} --model {MODEL}"
        arguments += f" --tokenizer {MODEL_PATH} --dataset-name random --random-input-len 48"
        arguments += f" --random-output-len 12 --num-prompts {PROMPTS} --max-concurrency 4 --ignore-eos"
        arguments += f" --save-result --result-dir {DIRECTORY} --result-filename {backend}.json"
        more = ["--extra-body", ANSWER_AT_ONCE] if "chat" in backend else []
        run("vllm", "bench", "serve", *arguments.split(), *more)
        found = json.loads((DIRECTORY / f"{backend}.json").read_text())
        assert found["completed"] == PROMPTS, found["completed"]
        assert found["total_output_tokens"] == PROMPTS * 12
        assert found["mean_ttft_ms"] > 0


register("openai", "/v1/completions")
register("openai-chat", "/v1/chat/completions")

if __name__ == "__main__":
    features.run()
