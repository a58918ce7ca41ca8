"""Tests use public facts: no private attribute or function of the product, except where a list says so."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.architecture.source_tree import Module, modules

# Names with an underscore that belong to Python, torch or another library, and have no public form.
FOREIGN = {
    **dict.fromkeys(("_replace", "_fields"), "the interface of named tuples"),
    **dict.fromkeys(("_getframe", "_current_frames"), "stacks of threads, in sys"),
    "_exit": "os._exit ends a forked child without the handlers of its parent",
    **dict.fromkeys(
        ("_cdata", "_schema", "_sleep"), "identity of storages, schemas of operators, GPU delays: torch"
    ),
    "_SSL_CONTEXT_VERIFIED": "aiohttp's default TLS context, to trust a test's own authority",
}
# Files that remove or observe what has no public form, with the reason.
EXCEPTIONS = {
    "tests/chaos/undo/sitecustomize.py": "takes fixes out of the product",
    "tests/fakes/compile_for.py": "compiles every launcher, also those that only the product's dispatch calls",
    "tests/fuzz/wire_targets.py": "builds frames that the public encoders refuse to build",
    "tests/fakes/hostile_frames.py": "builds frames that the public encoders refuse to build",
    "tests/unit/kv_transfer/test_handoff_record.py": "builds records that the public encoders refuse to build",
    "tests/unit/kv_cache/test_page_space_model.py": "compares every page with a model after every step",
}
# Uses that are left per file. Replace them by public facts and lower the number; it never grows.
LEFT: dict[str, int] = {
    "tests/bench/rounds.py": 2,
    "tests/fakes/late_graphs.py": 3,
    "tests/fakes/marking_sender.py": 1,
    "tests/fakes/published_heads.py": 1,
    "tests/fakes/router_rig.py": 1,
    "tests/unit/common/test_bad_frames.py": 7,
    "tests/unit/common/test_channel.py": 3,
    "tests/unit/common/test_half_open.py": 7,
    "tests/unit/common/test_handshake_guard.py": 5,
    "tests/unit/common/test_session.py": 1,
    "tests/unit/decode_node/test_faults.py": 12,
    "tests/unit/decode_node/test_peers_and_retraction.py": 1,
    "tests/unit/deploy/test_children.py": 2,
    "tests/unit/deploy/test_cli.py": 5,
    "tests/unit/deploy/test_supervisor.py": 4,
    "tests/unit/engine/graphs/test_outputs.py": 2,
    "tests/unit/engine/test_qwen_vl.py": 1,
    "tests/unit/engine/test_sampling_kernel.py": 1,
    "tests/unit/engine/test_shared_memory.py": 1,
    "tests/unit/kv_cache/test_page_allocator.py": 2,
    "tests/unit/kv_cache/test_radix_cache.py": 5,
    "tests/unit/kv_transfer/test_cuda_cluster.py": 5,
    "tests/unit/kv_transfer/test_cuda_layers.py": 2,
    "tests/unit/kv_transfer/test_faults.py": 7,
    "tests/unit/kv_transfer/test_invariants.py": 3,
    "tests/unit/kv_transfer/test_liveness.py": 9,
    "tests/unit/kv_transfer/test_nixl.py": 11,
    "tests/unit/kv_transfer/test_sender_work.py": 1,
    "tests/unit/kv_transfer/test_shm.py": 1,
    "tests/unit/kv_transfer/test_tcp.py": 5,
    "tests/unit/node/test_announced_work.py": 1,
    "tests/unit/node/test_graph_start.py": 1,
    "tests/unit/node/test_router_link.py": 10,
    "tests/unit/prefill_node/graphs/test_patch_encoder.py": 4,
    "tests/unit/prefill_node/graphs/test_piecewise.py": 2,
    "tests/unit/prefill_node/graphs/test_prefill_extend.py": 5,
    "tests/unit/prefill_node/test_image_axes.py": 1,
    "tests/unit/prefill_node/test_page_sending.py": 2,
    "tests/unit/prefill_node/test_peer_frames.py": 1,
    "tests/unit/prefill_node/test_vision.py": 6,
    "tests/unit/router/test_accepting.py": 2,
    "tests/unit/router/test_admission.py": 7,
    "tests/unit/router/test_auth_keys.py": 1,
    "tests/unit/router/test_auth_limits.py": 1,
    "tests/unit/router/test_connections.py": 2,
    "tests/unit/router/test_control_plane.py": 12,
    "tests/unit/router/test_dispatcher.py": 8,
    "tests/unit/router/test_fair_queue.py": 3,
    "tests/unit/router/test_fetch_process.py": 1,
    "tests/unit/router/test_handshakes.py": 2,
    "tests/unit/router/test_image_fetch.py": 1,
    "tests/unit/router/test_images.py": 13,
    "tests/unit/router/test_listeners.py": 1,
    "tests/unit/router/test_node_registry.py": 2,
    "tests/unit/router/test_spawner.py": 6,
}


def test_tests_use_public_facts() -> None:
    found = Counter(
        module.place for module in modules(["tests"]) if module.place not in EXCEPTIONS for _ in _uses(module)
    )
    more = [
        f"{place}: {count} uses, {LEFT.get(place, 0)} allowed"
        for place, count in found.items()
        if count > LEFT.get(place, 0)
    ]
    assert not more, "use a public fact (method, counter, log line, effect on a fake):\n" + "\n".join(more)


def _uses(module: Module) -> Iterator[str]:
    """Yield every use of a private name that the module does not define itself."""
    own = set(_defined(module.tree)) | set(FOREIGN)
    for node in ast.walk(module.tree):
        for name in _private_names(node):
            if name not in own:
                yield f"{module.place}:{getattr(node, 'lineno', 0)}: {name}"


def _private_names(node: ast.AST) -> Iterator[str]:
    """Yield the private names that a node takes from an object, a module, or by a string (`setattr`)."""
    names: list[str] = []
    if isinstance(node, ast.Attribute) and not _is_own(node.value):
        names = [node.attr]
    elif isinstance(node, ast.ImportFrom):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
        "setattr",
        "getattr",
        "delattr",
    ):
        texts = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
        names = [text.rpartition(".")[2] for text in texts if isinstance(text, str)]
    yield from (name for name in names if name.startswith("_") and not name.startswith("__"))


def _is_own(value: ast.expr) -> bool:
    """Whether the object is the class's own: `self`, `cls` or `super()`."""
    return ast.unparse(value) in ("self", "cls", "super()")


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@pytest.mark.parametrize(
    "text",
    [
        "rig.sender._rooms",
        "del rig._rooms[1]",
        "from router.images import _from_base64",
        "monkeypatch.setattr(graphs, '_choose', choose)",
        "monkeypatch.setattr('deploy.own_model._read', f)",
        "getattr(link, '_dealer')",
    ],
)
def test_private_uses_are_found(text: str) -> None:
    assert len(list(_uses(Module("tests.x", "tests/x.py", text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def f(self, other):\n        self._x = 1\n        return other._x",
        "class A(B):\n    def f(self):\n        return super()._f() + self._g",
        "tile._replace(rows=1)",
        "made.__class__",
    ],
)
def test_what_is_a_modules_own_is_allowed(text: str) -> None:
    assert not list(_uses(Module("tests.x", "tests/x.py", text)))
