"""The files of the page: open to everyone, cached by their content, and free of anything from another host."""

from __future__ import annotations

import re

import pytest

from router.page.routes import POLICY, STATIC
from tests.fakes.served_series import served_series
from tests.unit.router.auth.test_gates import key_gate
from tests.unit.router.conftest import Rig, Serve

FILES = sorted(path.name for path in STATIC.iterdir())
OWN = [name for name in FILES if not name.startswith("uplot")]


async def test_the_index_with_its_policy(rig: Rig) -> None:
    async with rig.session.get(rig.url + "/") as response:
        assert response.status == 200
        assert response.content_type == "text/html"
        assert response.headers["Content-Security-Policy"] == POLICY
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        text = await response.text()
    assert "unsafe" not in POLICY
    for name in re.findall(r'(?:src|href)="page/([^"]+)"', text):
        assert name in FILES


async def test_a_file_that_the_client_has_is_not_sent_again(rig: Rig) -> None:
    async with rig.session.get(rig.url + "/page/main.js") as response:
        assert response.content_type == "text/javascript"
        assert await response.read() == (STATIC / "main.js").read_bytes()
        etag = response.headers["ETag"]
    async with rig.session.get(rig.url + "/page/main.js", headers={"If-None-Match": etag}) as response:
        assert response.status == 304
        assert await response.read() == b""
    async with rig.session.get(rig.url + "/page/main.js", headers={"If-None-Match": '"other"'}) as response:
        assert response.status == 200


@pytest.mark.parametrize("name", ["nothing.js", "..%2froutes.py", "%2e%2e/routes.py", "static", ""])
async def test_other_names_are_not_found(rig: Rig, name: str) -> None:
    async with rig.session.get(rig.url + f"/page/{name}") as response:
        assert response.status == 404


async def test_files_need_no_key_but_all_data_does(serve: Serve) -> None:
    rig = await serve(gate=key_gate())
    for path in ("/", *(f"/page/{name}" for name in FILES)):
        async with rig.session.get(rig.url + path) as response:
            assert response.status == 200, path
    asked = re.findall(
        r'send\("([\w/]+)', (STATIC / "main.js").read_text() + (STATIC / "chat.js").read_text()
    )
    assert set(asked) == {"server_info", "requests", "metrics", "v1/chat/completions"}
    for path in asked:
        method = "POST" if path.startswith("v1/") else "GET"
        async with rig.session.request(method, f"{rig.url}/{path}") as response:
            assert response.status == 401, path


@pytest.mark.parametrize("name", OWN)
def test_files_use_no_other_host_and_never_set_html(name: str) -> None:
    text = (STATIC / name).read_text()
    hosts = set(re.findall(r"https?://[^\"' )]+", text))
    assert hosts <= {"http://www.w3.org/2000/svg"}
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|EventSource", text
    )


def test_the_series_that_it_shows_are_served() -> None:
    scripts = "".join((STATIC / name).read_text() for name in OWN)
    names = set(re.findall(r'"((?:vllm:|tandem_)\w+)"', scripts))
    assert len(names) > 12
    served = served_series()
    assert {name for name in names if not {name, f"{name}_bucket"} & served} == set()


async def test_imports_name_files_that_exist() -> None:
    for name in OWN:
        for imported in re.findall(r'from "\./([^"]+)"', (STATIC / name).read_text()):
            assert imported in FILES, (name, imported)
