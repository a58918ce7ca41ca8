"""guidellm: concurrent streams on the chat and the completions API."""

from __future__ import annotations

import json

from tests.clients.features import MODEL, URL, Features
from tests.clients.programs.command import DIRECTORY, MODEL_PATH, run

REQUESTS = 10
features = Features(deadline=300)


def register(path: str) -> None:
    @features.case(f"{REQUESTS} streams: {path}")
    def benchmark() -> None:
        output = DIRECTORY / f"out-{path.replace('/', '-')}.json"
        run(
            "guidellm",
            "run",
            f"--backend=kind=openai_http,target={URL},model={MODEL},request_format={path}",
            "--profile=kind=concurrent,streams=4",
            f"--constraint=kind=max_requests,count={REQUESTS}",
            f"--tokenizer=kind=huggingface_auto,model={MODEL_PATH}",
            "--data=kind=synthetic_text,prompt_tokens=32,output_tokens=12",
            f"--output=kind=json,path={output}",
            "--disable-console",
        )
        [done] = json.loads(output.read_text())["benchmarks"]
        requests = done["requests"]
        assert len(requests["successful"]) == REQUESTS, {name: len(each) for name, each in requests.items()}
        assert all(each["output_tokens"] == 12 for each in requests["successful"])


for each in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
    register(each)

if __name__ == "__main__":
    features.run()
