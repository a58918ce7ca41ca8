"""Rules about the source that no linter knows: nothing that runs what it reads, no role flags, no drawer modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.source_tree import ROOT, Module, modules

MODULES = modules()
MAX_LINES = 400
# Files that may be longer, and why.
LONGER: dict[str, str] = {}

DANGEROUS_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
DANGEROUS_CALLS = {
    "eval",
    "exec",
    "compile",
    "torch.load",
    "torch.hub.load",
    "np.load",
    "numpy.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "os.popen",
}
DANGEROUS_METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized"}
# The one loader of cluster files: yaml.load with a SafeLoader subclass that also refuses duplicate keys.
YAML_LOADER = "common/config/yaml_file.py"

ROLE_FLAGS = re.compile(
    r"(^|_)is_(draft|target|prefill|decode|disagg\w*|speculative|spec|router|eagle|mtp)(_|$)"
    r"|disagg\w*_mode|disaggregation|(^|_)draft_worker|(^|_)spec_mode|(^|_)node_mode|(^|_)role_flag"
    r"|(^|_)(enable|disable|use)_(draft|spec\w*|overlap|disagg\w*)(_|$)"
)
DRAWERS = {"utils", "util", "helpers", "helper", "misc", "common_utils", "shared", "base_utils", "tools"}


def test_nothing_runs_what_it_reads() -> None:
    dangers = [danger for module in MODULES for danger in _dangers(module)]
    assert not dangers, "\n".join(dangers)


def _dangers(module: Module) -> Iterator[str]:
    for each in module.imports:
        if each.target.partition(".")[0] in DANGEROUS_MODULES:
            yield f"{module.place}:{each.line} imports {each.target}"
        if each.target in DANGEROUS_CALLS:
            yield f"{module.place}:{each.line} imports {each.target}"
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in DANGEROUS_CALLS and not (called == "yaml.load" and _strict_yaml(module, node)):
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


def _strict_yaml(module: Module, call: ast.Call) -> bool:
    return module.place == YAML_LOADER and [
        (keyword.arg, ast.unparse(keyword.value)) for keyword in call.keywords
    ] == [("Loader", "_StrictLoader")]


def test_no_role_flags() -> None:
    """A role is a composition, written once in build.py; no class asks what it is part of."""
    flags = [
        f"{module.place}: {name}"
        for module in MODULES
        for name in sorted(set(_identifiers(module.tree)))
        if ROLE_FLAGS.search(name.lower())
    ]
    assert not flags, "\n".join(flags)


def _identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg is not None):
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


def test_the_dangers_are_seen() -> None:
    text = (
        "import pickle\nfrom torch import load\nx = eval('1')\nyaml.load(t, Loader=_StrictLoader)\n"
        "socket.recv_pyobj()\nnp.load(p, allow_pickle=True)\nf(trust_remote_code=flag)\nrun(c, shell=True)\n"
        "from marshal import loads\nre.compile('x')\nf(weights_only=False)\n"
    )
    module = Module("router.x", "router/x.py", text)
    assert sorted(int(danger.split(":")[1].split()[0]) for danger in _dangers(module)) == [
        *(1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 11)
    ]


def test_no_drawer_modules() -> None:
    places = [module.place for module in [*MODULES, *modules(["tests"])]]
    drawers = [place for place in places if DRAWERS & set(place.removesuffix(".py").split("/"))]
    assert not drawers, "name it after what it does, beside its user: " + ", ".join(drawers)


def test_every_module_says_what_it_is_for() -> None:
    """The first line of a module; in __init__ the charter of its folder."""
    silent = [module.place for module in MODULES if not ast.get_docstring(module.tree)]
    assert not silent, "no docstring: " + ", ".join(silent)


def test_every_folder_with_code_is_a_package() -> None:
    folders = {module.place.rpartition("/")[0] for module in MODULES}
    missing = [folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()]
    assert not missing, "a folder without __init__.py has no charter: " + ", ".join(sorted(missing))


def test_files_stay_small() -> None:
    lines = {module.place: module.text.count("\n") for module in MODULES}
    long = [
        f"{place}: {count}" for place, count in lines.items() if count > MAX_LINES and place not in LONGER
    ]
    assert not long, f"over {MAX_LINES} lines; split it, or say in LONGER why not: " + ", ".join(long)
    short = [place for place in LONGER if lines.get(place, 0) <= MAX_LINES]
    assert not short, "short again, take it off LONGER: " + ", ".join(short)


def test_no_test_is_decided_by_how_fast_something_was() -> None:
    """Machines stall for seconds. `tests.fakes.waiting` waits for what happens; work is counted, or in thread_time."""
    measured = re.compile(r"perf_counter|\btime\.time\(\) -|monotonic\(\) -")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("unit", "cluster")
        for path in sorted((ROOT / "tests" / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if measured.search(line)
    ]
    assert not wrong, "measures wall time: " + ", ".join(wrong)


def test_the_wall_clock_is_for_people() -> None:
    """It jumps (RELIABILITY.md, 24): deadlines and waits go by the monotonic one. These places show it to a person."""
    shown = {
        "common/ipc/router_link.py",  # since when the load of a node is so
        "router/app.py",  # `created` of the model
        "router/openai_routes.py",  # `created` of an answer
        "router/template_sandbox.py",  # the date, which a chat template may ask for
    }
    wall = re.compile(r"\btime\.(time|time_ns|localtime)\(|\bdatetime\.(now|utcnow|today)\(|\bdate\.today\(")
    cards = "deploy/models/"  # say when they were made
    used = {module.place for module in MODULES if wall.search(module.text)}
    used = {place for place in used if not place.startswith(cards)}
    assert used == shown


def test_top_level_folders() -> None:
    """ARCHITECTURE.md fixes them: a new folder is a decision, not an accident."""
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
    """One composition root per process: below it nobody sees a config object."""
    allowed = re.compile(
        r"^(common/config/|deploy/|[a-z_]+/(build|__main__|app|from_config)\.py$"
        r"|common/(process|ipc/from_config|engine/serving_(model|link))\.py$)"
    )
    wrong = [
        f"{module.place}:{each.line} imports {each.target}"
        for module in MODULES
        for each in module.imports
        if each.target.startswith("common.config") and not allowed.match(module.place)
    ]
    assert not wrong, "\n".join(wrong)
