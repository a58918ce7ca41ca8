"""SGLang's /v1/loads and /get_load over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.api_keys import bearer
from tests.unit.router.auth.test_gates import key_gate
from tests.unit.router.conftest import Rig, Serve


async def get(rig: Rig, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    async with rig.session.get(rig.url + path, headers=headers) as response:
        return response.status, await response.json()


async def test_the_cluster_is_described_as_one_rank(serve: Serve) -> None:
    rig = await serve()
    rig.active, rig.on_nodes = 5, 3
    status, answer = await get(rig, "/v1/loads?include=core")
    assert status == 200
    assert (answer["dp_rank_count"], answer["version"]) == (1, "0.1.0")
    assert answer["timestamp"].endswith("+00:00")
    assert answer["loads"] == [
        {
            "dp_rank": 0,
            "num_running_reqs": 3,
            "num_waiting_reqs": 2,
            "num_used_tokens": 96,
            "num_total_tokens": 136,
            "max_total_num_tokens": 1024,
            "token_usage": 0.0938,
        }
    ]
    assert answer["aggregate"] == {
        "total_running_reqs": 3,
        "total_waiting_reqs": 2,
        "total_reqs": 5,
        "total_used_tokens": 96,
        "total_tokens": 136,
        "avg_token_usage": 0.0938,
    }
    assert (await get(rig, "/v1/loads?dp_rank=0"))[1]["loads"] == answer["loads"]
    status, (former,) = await get(rig, "/get_load")
    assert status == 200
    assert former.pop("ts_tic") > 0
    assert former == {
        "dp_rank": 0,
        "num_reqs": 5,
        "num_waiting_reqs": 2,
        "num_tokens": 136,
        "num_pending_tokens": 40,
    }


async def test_requests_that_ended_since_the_last_heartbeat_are_not_waiting(serve: Serve) -> None:
    rig = await serve()
    rig.on_nodes = 3
    load = (await get(rig, "/v1/loads"))[1]["loads"][0]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (3, 0)


@pytest.mark.parametrize(("name", "value"), [("format", "prometheus"), ("dp_rank", "1")])
async def test_series_and_other_ranks_are_refused(serve: Serve, name: str, value: str) -> None:
    status, answer = await get(await serve(), f"/v1/loads?{name}={value}")
    assert (status, answer["error"]["param"]) == (400, name)


async def test_other_clients_do_not_see_the_load(serve: Serve) -> None:
    rig = await serve(gate=key_gate())
    for path in ("/v1/loads", "/get_load"):
        status, answer = await get(rig, path, bearer("secret-a"))
        assert status == 403
        assert answer["error"]["message"].startswith(f"{path} shows other clients' load and needs an API key")
        assert (await get(rig, path, bearer("secret-ops")))[0] == 200
