"""opencode, a coding agent on chats: answers, and a tool of its own that it runs."""

from __future__ import annotations

import json
from typing import Any

from tests.clients.features import (
    ABOUT,
    KEY,
    MODEL,
    PRODUCT,
    QUESTION,
    RESULT,
    V1,
    Features,
    is_product,
    says_product,
)
from tests.clients.programs.command import DIRECTORY, run

SETTINGS: dict[str, Any] = {
    "model": f"local/{MODEL}",
    "small_model": f"local/{MODEL}",
    "autoupdate": False,
    "share": "disabled",
    # Without its own tools: their descriptions take most of the context, and the model cannot call them.
    "agent": {
        "build": {
            "prompt": "Answer the question.",
            "temperature": 0,
            "tools": {"*": False, "calculator": True},
        },
        "plain": {
            "prompt": "Answer the question.",
            "temperature": 0,
            "tools": {"*": False},
            "mode": "primary",
        },
    },
    "provider": {
        "local": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "local",
            "options": {"baseURL": V1, "apiKey": KEY},
            "models": {MODEL: {"name": MODEL, "limit": {"context": 16000, "output": 200}}},
        }
    },
}
CALCULATOR = f"""
import {{ z }} from "zod";
export default {{
  description: "{ABOUT}",
  args: {{ expression: z.string().describe("the arithmetic expression") }},
  async execute() {{ return "{RESULT}"; }},
}};
"""
features = Features(deadline=300)
case = features.case


def parts(*arguments: str) -> list[dict[str, Any]]:
    """Return the parts of a conversation that one command adds."""
    printed = run("opencode", "run", "--format", "json", *arguments, home=DIRECTORY / "home")
    return [json.loads(line)["part"] for line in printed.splitlines() if line.startswith("{")]


def text(found: list[dict[str, Any]]) -> str:
    return "".join(part["text"] for part in found if part["type"] == "text")


@case("an answer")
def answer() -> None:
    """The prompt has the date and the directory, so that the model may answer wrongly."""
    assert text(parts("--agent", "plain", QUESTION))


@case("a conversation")
def conversation() -> None:
    parts("--agent", "plain", "hello")
    assert text(parts("--agent", "plain", "--continue", QUESTION))


@case("tools auto, and their result")
def tools() -> None:
    found = parts(PRODUCT)
    [call] = [part for part in found if part["type"] == "tool"]
    is_product(call["tool"], call["state"]["input"])
    says_product(text(found))


if __name__ == "__main__":
    (DIRECTORY / "opencode.json").write_text(json.dumps(SETTINGS))
    folder = DIRECTORY / ".opencode" / "tool"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "calculator.js").write_text(CALCULATOR)
    features.run()
