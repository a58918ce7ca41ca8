"""Source rules that no linter has: nothing runs data that it reads, no role flags, no catch-all modules."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator

import pytest

from tests.architecture.source_tree import ROOT, Module, dotted, modules

MODULES = modules()
MAX_LINES = 400
# Files that may exceed the length limit, and the reason.
LONGER: dict[str, str] = {}

# Modules that execute their input, and those whose connections use pickle.
DANGEROUS_MODULES = {
    *("pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"),
    *("multiprocessing", "concurrent.futures.process", "xmlrpc", "imp", "runpy", "pty", "commands"),
    *("torch.package", "torch.hub", "torch.distributed.rpc", "torch.multiprocessing"),
}
DANGEROUS_CALLS = {
    *("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile"),
    *("torch.load", "torch.jit.load", "torch.export.load", "torch.hub.load", "torch.package.PackageImporter"),
    *("numpy.load", "numpy.fromregex", "pandas.read_pickle"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load"),
    *("yaml.full_load_all", "yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    "concurrent.futures.ProcessPoolExecutor",
}
# Called on any object: ZMQ's pickling methods, and collectives of torch.distributed that pickle.
DANGEROUS_METHODS = {
    *("recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
# Training of the shipped models reads no external input: its workers are its own forks.
TRAINING = "deploy/tiny_models/"
OWN_WORKERS = {"multiprocessing", "concurrent.futures.ProcessPoolExecutor"}
# The one loader of cluster files: yaml.load with a SafeLoader subclass that also refuses duplicate keys.
YAML_LOADER = "common/config/yaml_file.py"
# The one reader of pickled weights: a confined child process of `deploy/convert`.
PICKLE_READER, PICKLE_READ = "deploy/pickled_weights.py", "torch.load"

ROLE_FLAGS = re.compile(
    r"(^|_)is_(draft|target|prefill|decode|disagg\w*|speculative|spec|router|eagle|mtp)(_|$)"
    r"|disagg\w*_mode|disaggregation|(^|_)draft_worker|(^|_)spec_mode|(^|_)node_mode|(^|_)role_flag"
    r"|(^|_)(enable|disable|use)_(draft|spec\w*|overlap|disagg\w*)(_|$)"
)
DRAWERS = {"utils", "util", "helpers", "helper", "misc", "common_utils", "shared", "base_utils", "tools"}


def test_no_module_executes_data_that_it_reads() -> None:
    dangers = [danger for module in MODULES for danger in _dangers(module)]
    assert not dangers, "\n".join(dangers)


def _dangers(module: Module) -> Iterator[str]:
    for each in module.imports:
        parts = each.target.split(".")
        names = {".".join(parts[: count + 1]) for count in range(len(parts))}
        found = names & (DANGEROUS_MODULES | DANGEROUS_CALLS)
        if found and not (module.place.startswith(TRAINING) and found <= OWN_WORKERS):
            yield f"{module.place}:{each.line} imports {each.target}"
    full_names = dict(_full_names(module.nodes))
    for node in module.nodes:
        if not isinstance(node, ast.Call):
            continue
        called = _called(node.func, full_names)
        strict = called == "yaml.load" and _strict_yaml(module, node)
        own = called in OWN_WORKERS and module.place.startswith(TRAINING)
        confined = called == PICKLE_READ and module.place == PICKLE_READER and _weights_only(node)
        if called in DANGEROUS_CALLS and not strict and not own and not confined:
            yield f"{module.place}:{node.lineno} calls {called}"
        if isinstance(node.func, ast.Attribute) and node.func.attr in DANGEROUS_METHODS:
            yield f"{module.place}:{node.lineno} calls {called}"
        for keyword in node.keywords:
            constant = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg in ("allow_pickle", "trust_remote_code") and constant is not False:
                yield f"{module.place}:{node.lineno} {keyword.arg}={ast.unparse(keyword.value)}"
            if keyword.arg == "weights_only" and constant is not True:
                yield f"{module.place}:{node.lineno} {keyword.arg}={ast.unparse(keyword.value)}"
            if keyword.arg == "shell" and constant is not False:
                yield f"{module.place}:{node.lineno} runs a shell"


def _full_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield (name in this module, full name) of the names bound by `import a.b as c` and `from a import b as c`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (
                    alias.asname or alias.name.partition(".")[0],
                    alias.name if alias.asname else (alias.name.partition(".")[0]),
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _called(function: ast.expr, full_names: dict[str, str]) -> str:
    """Return the dotted name of the called function, whatever its imported alias."""
    first, dot, rest = (dotted(function) or ast.unparse(function)).partition(".")
    return f"{full_names.get(first, first)}{dot}{rest}"


def _strict_yaml(module: Module, call: ast.Call) -> bool:
    return module.place == YAML_LOADER and [
        (keyword.arg, ast.unparse(keyword.value)) for keyword in call.keywords
    ] == [("Loader", "_StrictLoader")]


def _weights_only(call: ast.Call) -> bool:
    return [ast.unparse(each.value) for each in call.keywords if each.arg == "weights_only"] == ["True"]


def test_no_role_flags() -> None:
    """Roles are composed in build.py; no class asks which role it belongs to."""
    flags = [
        f"{module.place}: {name}"
        for module in MODULES
        for name in sorted(set(_identifiers(module.nodes)))
        if ROLE_FLAGS.search(name.lower())
    ]
    assert not flags, "\n".join(flags)


def _identifiers(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.arg, ast.keyword)):
            if node.arg is not None:
                yield node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name


def test_the_role_pattern() -> None:
    for flag in (
        "is_draft",
        "is_draft_worker",
        "is_prefill",
        "disaggregation_mode",
        "enable_overlap",
        "_is_eagle",
    ):
        assert ROLE_FLAGS.search(flag), flag
    for name in (
        "is_free",
        "role",
        "draft",
        "is_loopback",
        "prefill_over",
        "is_cuda",
        "speculative",
        "is_of",
    ):
        assert not ROLE_FLAGS.search(name), name


DANGERS = [
    "import pickle",
    "from torch import load",
    "from marshal import loads",
    "import shelve",
    "x = eval('1')",
    "exec(text)",
    "import builtins\nbuiltins.exec(text)",
    "import torch as t\nt.load(p)",
    "torch.jit.load(p)",
    "import numpy as np\nnp.load(p)",
    "np.load(p, allow_pickle=True)",
    "yaml.load(t, Loader=_StrictLoader)",
    "import yaml as y\ny.load(t)",
    "from yaml import load as read",
    "yaml.unsafe_load(t)",
    "socket.recv_pyobj()",
    "socket.send_pyobj(1)",
    "from multiprocessing.connection import Client",
    "import multiprocessing as mp",
    "from torch.multiprocessing import spawn",
    "from concurrent.futures import ProcessPoolExecutor",
    "torch.distributed.all_gather_object(a, b)",
    "from torch.distributed import broadcast_object_list as send\ndist.broadcast_object_list(a)",
    "dist.scatter_object_list(a, b)",
    "dist.gather_object(a)",
    "dist.recv_object_list(a)",
    "f(trust_remote_code=flag)",
    "f(weights_only=False)",
    "run(c, shell=True)",
    "import os as system\nsystem.popen(c)",
]


@pytest.mark.parametrize("text", DANGERS)
def test_dangerous_calls_are_found(text: str) -> None:
    assert list(_dangers(Module("router.x", "router/x.py", text))), text


def test_pickled_weights_are_read_in_one_place_and_without_code() -> None:
    read, place = "import torch\ntorch.load(path, weights_only=True)", "deploy/pickled_weights.py"
    assert not list(_dangers(Module("deploy.pickled_weights", place, read)))
    assert list(_dangers(Module("deploy.convert", "deploy/convert.py", read)))
    assert list(_dangers(Module("deploy.pickled_weights", place, "import torch\ntorch.load(path)")))


@pytest.mark.parametrize(
    "text",
    [
        "import re\nre.compile('x')",
        "msgspec.json.decode(data)",
        "from concurrent.futures import ThreadPoolExecutor",
        "f(trust_remote_code=False, weights_only=True, shell=False)",
        "torch.distributed.all_gather(a, b)",
    ],
)
def test_harmless_calls_are_allowed(text: str) -> None:
    assert not list(_dangers(Module("router.x", "router/x.py", text)))


def test_ruff_bans_the_same_modules() -> None:
    """An editor with ruff then reports banned imports before this test does."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert {"S102", "S301", "S302", "S307", "S506", "TID"} <= set(settings["select"])
    banned = set(settings["flake8-tidy-imports"]["banned-api"])
    assert {
        "pickle",
        "marshal",
        "shelve",
        "dill",
        "cloudpickle",
        "joblib",
        "torch.load",
        "yaml.load",
    } <= banned
    assert {f"torch.distributed.{each}" for each in DANGEROUS_METHODS if "object" in each} <= banned
    assert {"multiprocessing.connection", "torch.jit.load", "numpy.load"} <= banned


def test_no_catch_all_modules() -> None:
    places = [module.place for module in [*MODULES, *modules(["tests"])]]
    drawers = [place for place in places if DRAWERS & set(place.removesuffix(".py").split("/"))]
    assert not drawers, "name it after what it does, beside its user: " + ", ".join(drawers)


def test_every_module_says_what_it_is_for() -> None:
    """The first line of a module states its purpose; in __init__, the charter of its folder."""
    silent = [module.place for module in MODULES if not ast.get_docstring(module.tree)]
    assert not silent, "no docstring: " + ", ".join(silent)


def test_every_folder_with_code_is_a_package() -> None:
    folders = {module.place.rpartition("/")[0] for module in MODULES}
    missing = [folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()]
    assert not missing, "a folder without __init__.py has no charter: " + ", ".join(sorted(missing))


def test_only_formats_know_how_products_keep_their_weights() -> None:
    """Elsewhere `.weight` belongs to a norm or an embedding, in the modules that own these."""
    names = ("layers/norm", "layers/linear", "collectives/parallel_modules")
    owners = {f"common/engine/{name}.py" for name in names}
    wrong = [
        f"{module.place}:{node.lineno} takes {ast.unparse(node)}"
        for module in MODULES
        if module.place.startswith(("common/", "prefill_node/", "decode_node/"))
        if not module.place.startswith("common/engine/formats/") and module.place not in owners
        for node in module.nodes
        if isinstance(node, ast.Attribute) and node.attr == "weight"
    ]
    assert not wrong, "\n".join(wrong)


def test_forward_code_does_not_know_its_rank() -> None:
    """A rank's share and the joining of results are chosen where layers are built; layouts and memory name the rank.

    Collectives are between ranks, and name them.
    """
    builders = {f"common/engine/layers/{name}.py" for name in ("linear", "attention", "ranks")}
    wrong = [
        f"{module.place}:{node.lineno} takes {ast.unparse(node)}"
        for module in MODULES
        if module.place.startswith(("common/engine/", "prefill_node/", "decode_node/"))
        if module.place not in builders and not module.place.startswith("common/engine/collectives/")
        for node in module.nodes
        if isinstance(node, ast.Attribute) and node.attr in ("rank", "size") and "shard" in ast.unparse(node)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_tables_name_a_language_model() -> None:
    """Code that uses a language model calls a `CausalLM` and names no model class."""
    wrong = [
        f"{module.place}:{each.line} imports {each.target}"
        for module in MODULES
        for each in module.imports
        if each.target == "common.engine.models.decoder.Decoder"
    ]
    assert not wrong, "\n".join(wrong)


def test_files_stay_small() -> None:
    lines = {module.place: module.text.count("\n") for module in MODULES}
    long = [
        f"{place}: {count}" for place, count in lines.items() if count > MAX_LINES and place not in LONGER
    ]
    assert not long, f"over {MAX_LINES} lines; split it, or say in LONGER why not: " + ", ".join(long)
    short = [place for place in LONGER if lines.get(place, 0) <= MAX_LINES]
    assert not short, "short again, take it off LONGER: " + ", ".join(short)


def test_no_test_is_decided_by_how_fast_something_was() -> None:
    """Machines stall for seconds, so a test that compares wall times fails at random.

    `tests.fakes.waiting` waits for events; work is counted, or measured in thread_time.
    """
    measured = re.compile(r"perf_counter|\btime\.time\(\) -|monotonic\(\) -")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("unit", "cluster")
        for path in sorted((ROOT / "tests" / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if measured.search(line)
    ]
    assert not wrong, "measures wall time: " + ", ".join(wrong)


def test_no_cancellation_is_lost() -> None:
    """asyncio.wait_for of Python 3.11 returns a result, or raises an error, that a cancellation meets: use timeout."""
    wrong = [module.place for module in MODULES if "asyncio.wait_for(" in module.text]
    assert not wrong, "use asyncio.timeout: " + ", ".join(wrong)


def test_wall_clock_time_is_only_shown_to_people() -> None:
    """The wall clock jumps, so deadlines use the monotonic clock.

    These places show wall-clock time to a person, or compare it with a date that a person has written.
    """
    shown = {
        "common/kv_events/publisher.py",  # the time of a batch, as vLLM's have it
        "common/node/router_link.py",  # the time of a node's load report
        "common/observability/logs.py",
        "common/observability/profile_files.py",  # names of files
        "deploy/api_key.py",  # whether the date of --expires has passed
        "kv_transfer/record_times.py",  # when a record was sent, in the timeline of its request
        "router/build.py",  # `created` of the model
        "router/apis/responses_answer.py",
        "router/metrics/histogram.py",  # when a series began
        "router/routes/loads.py",  # when the load of /v1/loads was read
        "router/routes/openai.py",  # `created` of an answer
        "router/routes/native.py",  # `created` of an answer
        "router/tracing/spans.py",  # when a span began
        "router/templates/sandbox.py",  # the date that chat templates may print
    }
    wall = re.compile(r"\btime\.(time|time_ns|localtime)\(|\bdatetime\.(now|utcnow|today)\(|\bdate\.today\(")
    cards = "deploy/tiny_models/"  # record when they were made
    used = {module.place for module in MODULES if wall.search(module.text)}
    used = {place for place in used if not place.startswith(cards)}
    assert used == shown


def test_top_level_folders() -> None:
    """The architecture fixes these folders: a new one must be a decision, not an accident."""
    folders = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and any(path.rglob("*.py")) and path.name[0] != "."
    }
    assert folders - {"build", "dist"} <= {
        "router",
        "prefill_node",
        "decode_node",
        "kv_transfer",
        "common",
        "tests",
        "deploy",
    }


def test_only_build_and_main_see_the_config() -> None:
    """Each process has one composition root: no other module reads a config object."""
    allowed = re.compile(
        r"^(common/config/|deploy/|[a-z_]+/(build|rank|__main__|from_config)\.py$"
        r"|kv_transfer/transport/[a-z_]+/kind\.py$"  # declares the transport's own keys
        r"|common/(process|(ipc|node/ranks)/from_config)\.py$)"
    )
    wrong = [
        f"{module.place}:{each.line} imports {each.target}"
        for module in MODULES
        for each in module.imports
        if each.target.startswith("common.config") and not allowed.match(module.place)
    ]
    assert not wrong, "\n".join(wrong)
