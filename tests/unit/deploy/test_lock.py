"""requirements.lock contains what pyproject.toml requires, each file by SHA-256; torch is installed separately."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.architecture.source_tree import ROOT
from tests.fakes.waiting import PATIENCE

PACKAGES = ("common", "kv_transfer", "prefill_node", "decode_node", "router", "deploy", "tests")
APART = {"torch"}  # deploy/setup explains why


def pins() -> list[tuple[Requirement, list[str]]]:
    """Return (name==version with its marker, hashes) of each entry."""
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [
        (
            Requirement(re.sub(r"--hash=\S+", "", line).strip()),
            re.findall(r"--hash=sha256:([0-9a-f]{64})\b", line),
        )
        for line in lines
    ]


def wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    names = [*project["project"]["dependencies"], *extras["dev"], *project["build-system"]["requires"]]
    return [Requirement(each) for each in names]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_every_requirement_is_pinned_to_a_version_that_fits(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    found = {
        canonicalize_name(pin.name): next(iter(pin.specifier)).version
        for pin, _ in pins()
        if pin.marker is None or pin.marker.evaluate(environment)
    }
    missing = [
        str(each)
        for each in wanted()
        if each.name not in APART
        and (each.marker is None or each.marker.evaluate(environment))
        and not each.specifier.contains(
            found.get(canonicalize_name(each.name), "0.0.dev0"), prereleases=False
        )
    ]
    assert not missing, f"run deploy/lock: not in requirements.lock, or in another version: {missing}"


def test_every_pin_has_hashes_and_torch_is_not_among_them() -> None:
    assert [str(pin) for pin, hashes in pins() if not hashes] == []
    assert len(pins()) > 60
    kept_out = re.compile(r"torch|nvidia-.*|cuda-.*")
    assert [pin.name for pin, _ in pins() if kept_out.fullmatch(pin.name)] == []


def test_the_supported_versions_of_python_are_one_statement() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {each.rpartition(" ")[2] for each in project["classifiers"] if "Python :: 3" in each}
    supported = SpecifierSet(project["requires-python"])
    assert named == {f"3.{minor}" for minor in range(8, 20) if supported.contains(f"3.{minor}")}
    assert "(3, 11) <= sys.version_info[:2] <= (3, 14)" in (ROOT / "deploy" / "setup").read_text()


def test_the_name_is_not_the_strangers_package() -> None:
    """`tandem` on PyPI is another project: nothing in the tree may advise to install it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "tandem-serving"
    files = [
        path
        for pattern in ("*.md", "docs/*.md", "deploy/**/*.yaml", "*/**/*.py", "deploy/*")
        for path in ROOT.glob(pattern)
        if path.is_file() and path != Path(__file__)
    ]
    advice = re.compile(r"install [^\n`]*['\" ]tandem\b(?!-serving)")
    found = [str(path) for path in files if advice.search(path.read_text(errors="replace"))]
    assert len(files) > 300
    assert found == []


def sources() -> list[Path]:
    return [path for top in PACKAGES for path in sorted((ROOT / top).rglob("*.py"))]


REMOVED = {  # from the standard library, by 3.12 to 3.14
    *("asynchat", "asyncore", "cgi", "crypt", "distutils", "imghdr", "imp", "nntplib", "pipes", "telnetlib"),
}


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_an_interpreter_of_every_version_compiles_every_file(minor: int) -> None:
    """Only an interpreter of a version knows its grammar, so versions that are not on PATH are skipped."""
    interpreter = shutil.which(f"python3.{minor}")
    if interpreter is None or subprocess.run([interpreter, "--version"], capture_output=True).returncode:
        pytest.skip(f"no python3.{minor} on PATH: nothing is said about its grammar")
    code = "import sys\nfor f in sys.stdin.read().split('\\0'): compile(open(f).read(), f, 'exec')"
    found = subprocess.run(
        [interpreter, "-W", "error", "-c", code],
        input="\0".join(map(str, sources())),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert found.returncode == 0, found.stderr


def statements(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield these nodes and all statements in them, without expressions: a tenth of what `ast.walk` yields."""
    for node in nodes:
        yield node
        for blocks in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(node, blocks, ()))


def test_no_file_needs_more_than_the_oldest_version_or_what_later_ones_removed() -> None:
    """This interpreter's parser refuses what is newer than 3.11's grammar: new statements and type parameters.

    It does not see f-strings that reuse their quotes (3.12); ruff does, by its target-version. A file that passes here
    is expected to parse on later versions, which have removed no syntax, but only their interpreters prove it. Modules
    that they removed from the standard library are looked for among the imports.
    """
    for path in sources():
        for node in statements([ast.parse(path.read_text(), str(path), feature_version=(3, 11))]):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & REMOVED, path
