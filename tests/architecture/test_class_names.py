"""A class name means one thing in the whole product."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

from tests.architecture.source_tree import Module, modules

PRODUCT = ("common", "kv_transfer", "prefill_node", "decode_node", "router")
ROLES = {"prefill_node", "decode_node", "router"}
# Classes that several roles have, each in the file of the same name, and the concept that they share.
PARALLEL = {
    "Computation": "what a node computes with",
    "Forwards": "the forward passes of a node before their graphs are captured",
    "Links": "the connections of a node",
    "Scheduling": "the inputs of a node's scheduler",
    "Observation": "the logs, metrics and events of a process",
    "Queues": "the requests of a node, by state",
    "Planner": "turns the queues into plans, and results into progress",
    "Planned": "a plan, and the requests that it serves",
    "Worker": "executes plans",
    "DeviceWorker": "executes plans on one device",
    "RankedWorker": "executes plans on all ranks of a node",
    "ExclusiveWorker": "executes plans on a device that the other half of a movable node uses, too",
    "Launched": "a plan in progress",
    "Report": "the load and the counters that a node reports",
}


def _places(code: Iterable[Module]) -> dict[str, list[str]]:
    """Return the modules of each class name."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in code:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.place)
    return places


def _parallel(places: list[str]) -> bool:
    """Return whether these are files of one name in different roles."""
    roles = {place.partition("/")[0] for place in places}
    files = {place.partition("/")[2] for place in places}
    return len(roles) == len(places) > 1 and len(files) == 1 and roles <= ROLES


def _ambiguous(code: Iterable[Module]) -> list[str]:
    return [
        f"{name}: {', '.join(places)}"
        for name, places in _places(code).items()
        if len(places) > 1 and not (name in PARALLEL and _parallel(places))
    ]


def test_a_class_name_occurs_once() -> None:
    wrong = _ambiguous(modules(PRODUCT))
    assert not wrong, "say in the name which of them it is:\n" + "\n".join(wrong)


def test_the_list_of_parallel_classes_is_up_to_date() -> None:
    places = _places(modules(PRODUCT))
    assert [name for name in PARALLEL if not _parallel(places[name])] == []


def test_ambiguous_names_are_found() -> None:
    def module(place: str, name: str) -> Module:
        return Module(place.removesuffix(".py").replace("/", "."), place, f"class {name}:\n    pass\n")

    same = [module("prefill_node/parts.py", "Links"), module("decode_node/parts.py", "Links")]
    assert _ambiguous(same) == []
    assert _ambiguous([*same, module("common/parts.py", "Links")]) == [
        "Links: prefill_node/parts.py, decode_node/parts.py, common/parts.py"
    ]
    apart = [module("prefill_node/a.py", "Links"), module("decode_node/b.py", "Links")]
    assert _ambiguous(apart) == ["Links: prefill_node/a.py, decode_node/b.py"]
    other = [module("prefill_node/a.py", "Step"), module("decode_node/a.py", "Step")]
    assert _ambiguous(other) == ["Step: prefill_node/a.py, decode_node/a.py"]
