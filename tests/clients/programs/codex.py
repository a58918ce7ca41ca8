"""codex, a coding agent on /v1/responses: its own tools, some in a namespace, and conversations.

The model was not trained to call these tools, so a turn only has to end with an answer.
"""

from __future__ import annotations

import json
from typing import Any

from tests.clients.features import MODEL, PRODUCT, V1, Features
from tests.clients.programs.command import DIRECTORY, run

HOME = DIRECTORY / "home"
# Without a search of its own, which no local server has; a short system prompt saves time.
SETTINGS = f"""
model = "{MODEL}"
model_provider = "local"
model_instructions_file = "{HOME}/instructions.md"
web_search = "disabled"
[model_providers.local]
name = "local"
base_url = "{V1}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
features = Features(deadline=300)
case = features.case


def execute(*arguments: str) -> tuple[str, dict[str, Any]]:
    """Return the last answer of a turn and the usage."""
    printed = run("codex", "exec", *arguments, "--json", "--skip-git-repo-check", home=HOME)
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    *_, answer = [item["text"] for item in items if item["type"] == "agent_message"]
    [usage] = [event["usage"] for event in events if event["type"] == "turn.completed"]
    return answer, usage


@case("a turn with its tools and their namespace")
def turn() -> None:
    answer, usage = execute(PRODUCT)
    assert answer
    assert usage["input_tokens"] > 5000, "the tools are not in the prompt"


@case("a conversation")
def conversation() -> None:
    execute(PRODUCT)
    answer, usage = execute("resume", "--last", "And 2 * 7?")
    assert answer
    assert usage["cached_input_tokens"] > 0


if __name__ == "__main__":
    (HOME / ".codex").mkdir(parents=True, exist_ok=True)
    (HOME / ".codex" / "config.toml").write_text(SETTINGS)
    (HOME / "instructions.md").write_text("Answer the question.")
    features.run()
