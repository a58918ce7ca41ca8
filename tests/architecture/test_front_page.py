"""README and docs: they are short enough, links resolve, and the support matrix agrees with the tables of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.checkpoint.families import FAMILIES
from common.config.transports import TRANSPORTS
from common.speculation.table import ALGORITHMS
from router.requests.constraint_fields import ConstraintFields
from router.requests.openai_schema import NOT_YET

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)|(?:src|srcset)=\"([^\"]+)\"")
NAMED_FILE = re.compile(r"`((?:\.\./)?[\w./-]+\.(?:md|py|yaml|json))`")


def supported(row: str) -> str:
    """Return the cell `yes` of one row of the support matrix."""
    found = re.search(rf"^\| {row} \| (.*?) \| (.*?) \|$", README.read_text(), re.MULTILINE)
    assert found is not None, f"no row {row}"
    return found[1]


def test_the_readme_is_a_front_page() -> None:
    assert len(README.read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for link in (first or second for first, second in LINK.findall(page.read_text())):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_other_pages_that_are_named_exist(page: Path) -> None:
    named = {name for name in NAMED_FILE.findall(page.read_text()) if name.endswith(".md")}
    assert [name for name in named if not ((page.parent / name).exists() or (ROOT / name).exists())] == []


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {first for first, _ in LINK.findall(README.read_text())}
    assert {f"docs/{page.name}" for page in PAGES if page != README} <= linked


def test_the_support_matrix_names_what_the_tables_have() -> None:
    for algorithm in ALGORITHMS.keys() - {"none"}:
        assert f"`{algorithm}`" in supported("speculation")
    for transport in TRANSPORTS:
        assert f"`{transport}`" in supported("transports")
    for family in FAMILIES:
        name = family.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
        assert name in supported("model families")


def test_what_the_matrix_says_no_to_is_refused() -> None:
    assert {"use_beam_search", "lora_path", "prompt_embeds"} <= NOT_YET.keys()


def test_fields_of_structured_output_are_served() -> None:
    assert not set(ConstraintFields.__struct_fields__) & NOT_YET.keys()
    for name in ("JSON schema", "regex", "choice", "EBNF", "Lark"):
        assert name in supported("structured output")


def test_docs_name_every_row_of_their_tables() -> None:
    models = (ROOT / "docs/models.md").read_text()
    assert [family for family in FAMILIES if f"`{family}`" not in models] == []
    speculation = (ROOT / "docs/speculation.md").read_text()
    assert [name for name in ALGORITHMS if f"| `{name}` |" not in speculation] == []
    transports = (ROOT / "docs/transports.md").read_text()
    assert [name for name in TRANSPORTS if f"| `{name}` |" not in transports] == []
