"""llm, the command of that name: prompts, a conversation, tools and schemas."""

from __future__ import annotations

import json

from tests.clients.features import (
    ABOUT,
    KEY,
    MODEL,
    PARAMETERS,
    PENALTY,
    PRODUCT,
    QUESTION,
    RESULT,
    V1,
    Features,
    is_weather,
    says_product,
    solved,
)
from tests.clients.programs.command import DIRECTORY, run

CALCULATOR = f'def calculator(expression: str) -> str:\n    "{ABOUT}"\n    return "{RESULT}"\n'
HOME = DIRECTORY / "home"
features = Features(deadline=300)
case = features.case


def ask(*arguments: str) -> str:
    return run("llm", "-m", MODEL, "--key", KEY, "-o", "temperature", "0", *arguments, home=HOME)


@case("prompt, streamed")
def streamed() -> None:
    solved(ask(QUESTION))


@case("prompt, whole")
def whole() -> None:
    solved(ask("--no-stream", QUESTION))


@case("a conversation")
def conversation() -> None:
    ask("--system", "Be brief.", "hello")
    assert ask("--continue", QUESTION).strip()


@case("tools auto, and their result")
def tools() -> None:
    says_product(ask("--functions", CALCULATOR, PRODUCT))


@case("schema")
def schema() -> None:
    is_weather(ask("-o", "frequency_penalty", str(PENALTY), "--schema", json.dumps(PARAMETERS), QUESTION))


if __name__ == "__main__":
    settings = HOME / ".config" / "io.datasette.llm"
    settings.mkdir(parents=True, exist_ok=True)
    # JSON is YAML, too
    model = {
        "model_id": MODEL,
        "model_name": MODEL,
        "api_base": V1,
        "supports_tools": True,
        "supports_schema": True,
    }
    (settings / "extra-openai-models.yaml").write_text(json.dumps([model]))
    features.run()
