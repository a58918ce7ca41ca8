"""Import directions between packages, read from the syntax trees: no module is imported to find out."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache

import pytest

from tests.architecture.source_tree import (
    ROOT,
    Import,
    Module,
    dotted,
    imported,
    modules,
    resolve,
    with_packages,
)

MODULES = {module.name: module for module in modules()}
HEAVY = ("torch", "triton", "transformers", "safetensors")  # transformers and safetensors load torch
# The part of transformers that reads response templates loads no torch: see test_response_template.
WITHOUT_TORCH = {"router.chat.response_template": "transformers.utils.chat_parsing"}
TRANSPORTS = "kv_transfer.transport"

# The project packages that each one may import besides itself. "control" is common without its engine and node
# packages.
ALLOWED = {
    "control": set[str](),
    "engine": {"control"},
    "node": {"control", "engine"},
    "kv_transfer": {"control"},
    "prefill_node": {"control", "engine", "node", "kv_transfer"},
    "decode_node": {"control", "engine", "node", "kv_transfer"},
    "router": {"control"},
    # starts the others as processes; kv_transfer for the sweep of shared memory
    "deploy": {"control", "kv_transfer"},
    # the only process of both roles
    "movable": {"control", "engine", "node", "kv_transfer", "prefill_node", "decode_node"},
}
MOVABLE = "deploy.movable_node"
# Modules of common and kv_transfer, with their submodules, that only one kind of process may import.
ONLY_PREFILL = (
    "common.engine.attention.prompt_attention",
    "common.engine.attention.segments",
    "common.engine.attention.whole_prompt",
    "common.engine.ops.held_requests",
    "common.engine.models.llava",
    "common.engine.models.learned_tower",
    "common.engine.models.patch_attention",
    "common.engine.models.patch_merger",
    "common.engine.models.qwen_tower",
    "common.engine.models.qwen_vl",
    "common.engine.models.vision_part",
    "common.messages.image_inbox",
    "common.messages.prefill_inbox",
    "kv_transfer.compatible",
    "kv_transfer.early_slots",
    "kv_transfer.expiring",
    "kv_transfer.handshake",
    "kv_transfer.layer_send",
    "kv_transfer.outbound",
    "kv_transfer.outbound_room",
    "kv_transfer.ranks.sender_group",
    "kv_transfer.ranks.sender_messages",
    "kv_transfer.ranks.sender_rank",
    "kv_transfer.room_alarms",
    "kv_transfer.send_order",
    "kv_transfer.sender",
    "kv_transfer.sender_heartbeats",
    "kv_transfer.sending",
    "kv_transfer.transport.layers",
)
ONLY_DECODE = (
    "common.engine.attention.step_attention",
    "common.engine.ops.decode_attention",
    "common.engine.ops.key_parts",
    "common.engine.ops.round_inputs",
    "common.engine.ops.step_rows",
    "common.engine.ops.verify_attention",
    "common.messages.decode_inbox",
    "kv_transfer.inbound",
    "kv_transfer.inbound_room",
    "kv_transfer.rank_links",
    "kv_transfer.ranks.receiver_group",
    "kv_transfer.ranks.receiver_messages",
    "kv_transfer.receiver",
    "kv_transfer.receiver_heartbeats",
    "kv_transfer.receiving",
)
ONLY_ROUTER = (
    "common.api_key",
    "common.checkpoint.chat_template_file",
    "common.config.admin_listener",
    "common.config.api_keys",
)
# Trains the tiny models: the only part of deploy that computes, so it may use the engine (never a node).
MODEL_MAKERS = "deploy.tiny_models"


def _area(name: str) -> str:
    for area in ("engine", "node"):
        if _is_under(name, f"common.{area}"):
            return area
    if _is_under(name, MOVABLE):
        return "movable"
    top = name.partition(".")[0]
    return "control" if top == "common" else top


def _is_under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@cache
def _third_party(name: str) -> set[str]:
    """Return the packages from elsewhere that a module imports."""
    module, light = MODULES[name], WITHOUT_TORCH.get(name)
    return {
        each.target.partition(".")[0]
        for each in module.imports
        if not each.type_checking
        and resolve(each.target, MODULES) is None
        and not (light is not None and each.scope and _is_under(each.target, light))
    }


def _allowed(module: Module) -> set[str]:
    area = _area(module.name)
    return ALLOWED[area] | {area} | ({"engine"} if _is_under(module.name, MODEL_MAKERS) else set())


def test_directions() -> None:
    wrong = [
        f"{module.place}:{each.line} imports {target}; {_area(module.name)} may import {sorted(_allowed(module))}"
        for module in MODULES.values()
        for each in module.imports
        if (target := resolve(each.target, MODULES)) is not None and _area(target) not in _allowed(module)
    ]
    assert not wrong, "\n".join(wrong)


def _reaches(start: str, graph: dict[str, set[str]]) -> dict[str, str]:
    """Return module -> its first importer, for everything that importing `start` runs."""
    came_from = {start: ""}
    queue = [start]
    for name in queue:
        for each in sorted(graph[name]):
            if each not in came_from:
                came_from[each] = name
                queue.append(each)
    return came_from


def _chain(name: str, came_from: dict[str, str]) -> str:
    chain = [name]
    while came_from[chain[-1]]:
        chain.append(came_from[chain[-1]])
    return " <- ".join(chain)


@cache
def _run_graph() -> dict[str, set[str]]:
    """Return what importing each module runs: its imports, and the packages above them."""
    return {
        name: {
            each
            for target in imported(module, MODULES) | {name}
            for each in with_packages(target)
            if each in MODULES and each != name
        }
        for name, module in MODULES.items()
    }


def test_control_plane_never_reaches_torch() -> None:
    """This covers router, kv_transfer and common's control plane; kv_transfer.transport may touch device memory."""
    heavy = []
    for name in MODULES:
        if _area(name) not in ("router", "control", "kv_transfer") or _is_under(name, TRANSPORTS):
            continue
        came_from = _reaches(name, _run_graph())
        heavy += [
            f"{_chain(each, came_from)} imports {package}"
            for each in came_from
            if not _is_under(each, TRANSPORTS)
            for package in sorted(_third_party(each).intersection(HEAVY))
        ]
    assert not heavy, "\n".join(heavy)


@pytest.mark.parametrize(
    "name",
    [
        "decode_node.node",
        "decode_node.planner",
        "decode_node.parts",
        "prefill_node.node",
        "prefill_node.planner",
        "prefill_node.parts",
        "prefill_node.send_orders",
    ],
)
def test_schedulers_import_no_torch(name: str) -> None:
    """Schedulers of nodes decide without a device and hand plans to a worker."""
    came_from = _reaches(name, _run_graph())
    heavy = [
        f"{_chain(each, came_from)} imports {package}"
        for each in came_from
        if not _is_under(each, TRANSPORTS)
        for package in sorted(_third_party(each).intersection(HEAVY))
    ]
    assert not heavy, "\n".join(heavy)


def _reached_by(*entries: str) -> dict[str, str]:
    """Return what a process imports from these entries. Names in tables ("module:attribute") are not followed."""
    came_from: dict[str, str] = {}
    for entry in entries:
        came_from = _reaches(entry, _run_graph()) | came_from
    return came_from


@pytest.mark.parametrize(
    ("role", "own", "others"),
    [
        ("prefill_node", ONLY_PREFILL, ONLY_DECODE + ONLY_ROUTER),
        ("decode_node", ONLY_DECODE, ONLY_PREFILL + ONLY_ROUTER),
    ],
)
def test_a_role_does_not_import_what_only_another_one_runs(
    role: str, own: tuple[str, ...], others: tuple[str, ...]
) -> None:
    came_from = _reached_by(f"{role}.__main__", f"{role}.build")
    foreign = [_chain(each, came_from) for each in came_from if any(_is_under(each, name) for name in others)]
    assert not foreign, "\n".join(foreign)
    assert not [name for name in own if name not in came_from], "it has moved: correct the list"
    assert not [name for name in others if name not in MODULES], "it has moved: correct the list"


def test_a_movable_node_imports_both_roles_and_no_router() -> None:
    """Its composition is the only module that imports both; `test_directions` checks all others."""
    came_from = _reached_by(f"{MOVABLE}.__main__", f"{MOVABLE}.build")
    foreign = [_chain(each, came_from) for each in came_from if any(_is_under(each, n) for n in ONLY_ROUTER)]
    assert not foreign, "\n".join(foreign)
    assert not [name for name in ONLY_PREFILL + ONLY_DECODE if name not in came_from]
    importers = {
        name
        for name, module in MODULES.items()
        if {"prefill_node", "decode_node"}
        <= {each.partition(".")[0] for each in imported(module, MODULES, run=False)}
    }
    assert importers == {f"{MOVABLE}.build"}


def test_no_cycles() -> None:
    """Cycles between modules count, including packages' __init__ if they are imported by name."""
    graph = {name: imported(module, MODULES, run=False) for name, module in MODULES.items()}
    cycles = [sorted(group) for group in _components(graph) if len(group) > 1]
    assert not cycles, "\n".join(" <-> ".join(cycle) for cycle in cycles)


def test_no_cycles_between_folders_of_the_router() -> None:
    """A folder can then be read with those that it imports, and without those that import it."""
    graph: dict[str, set[str]] = {}
    for name, module in MODULES.items():
        if (folder := _folder(name)) is not None:
            found = {_folder(target) for target in imported(module, MODULES, run=False)}
            graph.setdefault(folder, set()).update(each for each in found - {folder} if each is not None)
    cycles = [sorted(group) for group in _components(graph) if len(group) > 1]
    assert len(graph) > 10
    assert not cycles, "\n".join(" <-> ".join(cycle) for cycle in cycles)


def _folder(name: str) -> str | None:
    """Return the folder of a module of the router, or None for modules outside folders."""
    parts = name.split(".")
    is_package = len(parts) == 2 and MODULES[name].place.endswith("__init__.py")
    return parts[1] if parts[0] == "router" and (len(parts) > 2 or is_package) else None


def _components(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for each in graph[name]:
            if each not in index:
                visit(each)
                low[name] = min(low[name], low[each])
            elif each in stack:
                low[name] = min(low[name], index[each])
        if low[name] == index[name]:
            at = stack.index(name)
            found.append(set(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in index:
            visit(name)
    return found


# Their data workers import them again.
TRAINERS = (
    "deploy.tiny_models.train_target",
    "deploy.tiny_models.training_options",
    "deploy.tiny_models.mixture.train_mixture",
    "deploy.tiny_models.tool_calls.train_tools",
)


def _may_hide(module: Module, each: Import) -> bool:
    """Entry points may import torch late: nodes report "importing" first, and the data workers do not need it."""
    package, _, last = module.name.rpartition(".")
    if last == "__main__":
        return each.target in (f"{package}.build.build", f"{package}.app.run")
    return module.name in TRAINERS and each.target.startswith("deploy.tiny_models.")


def test_no_import_is_hidden_in_a_function() -> None:
    """Imports of project modules inside functions hide cycles."""
    hidden = [
        f"{module.place}:{each.line} {each.scope}() imports {each.target}"
        for module in MODULES.values()
        for each in module.imports
        if each.scope and resolve(each.target, MODULES) is not None and not _may_hide(module, each)
    ]
    assert not hidden, "\n".join(hidden)


def test_no_import_only_for_types() -> None:
    """Imports under TYPE_CHECKING are another way to hide a cycle."""
    dodged = [
        f"{module.place}:{each.line} imports {each.target}"
        for module in MODULES.values()
        for each in module.imports
        if each.type_checking and resolve(each.target, MODULES) is not None and not _may_hide(module, each)
    ]
    assert not dodged, "\n".join(dodged)


def test_no_dynamic_import() -> None:
    """The only dynamic imports are those that a table names as "module:attribute"."""
    wrong = []
    for module in MODULES.values():
        if module.name == "common.named":
            continue
        for node in module.nodes:
            if isinstance(node, ast.Call):
                called = dotted(node.func)
                if called in ("__import__", "importlib.import_module", "import_module"):
                    wrong.append(f"{module.place}:{node.lineno} {called}")
    assert not wrong, "\n".join(wrong)


def test_no_relative_import() -> None:
    """A module has only one name, so that a search finds all of its users."""
    wrong = [
        f"{module.place}:{node.lineno}"
        for module in MODULES.values()
        for node in module.nodes
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "entry", ["router.build", "router.dispatch.dispatcher", "kv_transfer.sender", "common.config"]
)
def test_torch_is_not_loaded(entry: str) -> None:
    """Importing an entry in a real interpreter confirms what the syntax trees show; missing modules are skipped."""
    if entry not in MODULES:
        pytest.skip(f"{entry} does not exist")
    code = f"import {entry}, sys; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_import_reader_finds_every_form_of_import() -> None:
    """The import reader handles nested, relative, aliased and type-checking imports."""
    text = (
        "import a.b as c\n"
        "from . import d\n"
        "from .e import f\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import g\nelse:\n    import h\n"
        "def outer():\n    def inner():\n        from i import j\n"
        "class K:\n    def method(self):\n        import l\n"
        "try:\n    import m\nexcept ImportError:\n    import n\n"
    )
    module = Module("p.q.r", "p/q/r.py", text)
    seen = {(each.target, each.scope, each.type_checking) for each in module.imports}
    assert seen == {
        ("a.b", "", False),
        ("p.q.d", "", False),
        ("p.q.e.f", "", False),
        ("typing.TYPE_CHECKING", "", False),
        ("g", "", True),
        ("h", "", False),
        ("i.j", "outer.inner", False),
        ("l", "method", False),
        ("m", "", False),
        ("n", "", False),
    }
    assert {frozenset(group) for group in _components({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})} == {
        frozenset("abc"),
        frozenset("d"),
    }
