"""inspect: evaluations with its providers for OpenAI-compatible servers and for vLLM, with tools and an agent."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig, Model, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import Solver, generate, use_tools
from inspect_ai.tool import Tool, tool

from tests.clients.features import KEY, MODEL, PRODUCT, QUESTION, RESULT, V1, VALUE, Features

SAMPLES = 8
LOGS = tempfile.mkdtemp()
features = Features()
case = features.case
os.environ |= {"LOCAL_BASE_URL": V1, "LOCAL_API_KEY": KEY}


@tool
def calculator() -> Tool:
    async def execute(expression: str) -> str:
        """Evaluates an arithmetic expression.

        Args:
            expression: the arithmetic expression
        """
        return RESULT

    return execute


def model(**options: Any) -> Model:
    return get_model(f"openai-api/local/{MODEL}", config=GenerateConfig(temperature=0), **options)


def scored(solver: Solver | list[Solver], asked: Model, *samples: Sample, **options: Any) -> EvalLog:
    """Evaluate samples, all of which must be right."""
    task = Task(dataset=[*samples], solver=solver, scorer=includes())
    [log] = eval(task, model=asked, display="none", log_dir=LOGS, max_retries=0, **options)
    assert log.status == "success", log.error
    assert log.results is not None
    said = [sample.output.completion for sample in log.samples or ()]
    assert log.results.scores[0].metrics["accuracy"].value == 1, said
    return log


@case("evaluation")
def evaluation() -> None:
    scored(generate(), model(), *(Sample(input=QUESTION, target=VALUE) for _ in range(SAMPLES)))


@case("log-probabilities and stop sequences")
def logprobs() -> None:
    solver = generate(logprobs=True, top_logprobs=2, stop_seqs=["####"], seed=3)
    log = scored(solver, model(), Sample(input=QUESTION, target=VALUE))
    assert log.samples
    choice = log.samples[0].output.choices[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs.content[0].top_logprobs or ()) == 2


@case("tools auto, and their result")
def tools() -> None:
    scored([use_tools(calculator()), generate()], model(), Sample(input=PRODUCT, target=RESULT))


@case("responses: tools auto, and their result")
def responses() -> None:
    solver = [use_tools(calculator()), generate()]
    scored(solver, model(responses_api=True), Sample(input=PRODUCT, target=RESULT))


@case("an agent")
def agent() -> None:
    """The model does not know the tool by which such agents end, so this one ends with an answer."""
    solver = react(tools=[calculator()], submit=False)
    scored(solver, model(), Sample(input=PRODUCT, target=RESULT), message_limit=8)


@case("provider vllm")
def vllm() -> None:
    config = GenerateConfig(temperature=0)
    asked = get_model(f"vllm/{MODEL}", base_url=V1, api_key=KEY, config=config)
    scored(generate(), asked, Sample(input=QUESTION, target=VALUE))


if __name__ == "__main__":
    features.run()
