"""The Grafana board: every query names series that the router serves."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.fakes.served_series import served_series

BOARD = json.loads((Path(__file__).parents[3] / "deploy/grafana/tandem.json").read_text())


def queries() -> list[str]:
    return [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]


def test_every_query_of_the_board_names_a_series() -> None:
    names = {
        name for query in queries() for name in re.findall(r"\b(?:vllm:|tandem_|http_|process_)\w+", query)
    }
    assert len(names) > 30
    assert names <= served_series()


def test_every_query_of_a_series_of_nodes_selects_the_model() -> None:
    unlabelled = re.compile(r"(?:vllm:|tandem_(?:kv|node|graph|stage|handover|forward|late))\w+(?!\w|\{)")
    assert not [query for query in queries() if unlabelled.search(query)]


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_queries_have_balanced_brackets() -> None:
    for query in queries():
        for opened, closed in ("()", "{}", "[]"):
            assert query.count(opened) == query.count(closed), query
