"""A Hugging Face hub with one model on loopback: the routes that huggingface_hub uses for a snapshot."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "f" * 40


@dataclass
class HubServer:
    """Serves `files` under `name`. `asked` lists the paths of all requests, `tokens` their authorization."""

    name: str
    files: Mapping[str, bytes]
    gated: bool = False
    url: str = ""
    asked: list[str] = field(default_factory=list)
    fetched: set[str] = field(default_factory=set)
    tokens: set[str] = field(default_factory=set)

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get(f"/api/models/{self.name}/revision/{{revision}}", self._revision)
        app.router.add_get(f"/api/models/{self.name}/tree/{{revision}}", self._tree)
        app.router.add_get(f"/{self.name}/resolve/{{revision}}/{{file:.+}}", self._file)
        app.router.add_route("*", "/{rest:.*}", self._unknown)
        return app

    def _note(self, request: web.Request) -> str:
        self.asked.append(request.path)
        self.tokens.add(request.headers.get("Authorization", ""))
        revision = {"main": COMMIT, "older": OLDER}.get(
            request.match_info["revision"], request.match_info["revision"]
        )
        if revision not in (COMMIT, OLDER):
            raise web.HTTPNotFound(headers={"X-Error-Code": "RevisionNotFound"})
        return revision

    async def _revision(self, request: web.Request) -> web.Response:
        siblings = [{"rfilename": name} for name in self.files]
        return web.json_response({"id": self.name, "sha": self._note(request), "siblings": siblings})

    async def _tree(self, request: web.Request) -> web.Response:
        self._note(request)
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in self.files.items()
        ]
        return web.json_response(entries)

    async def _file(self, request: web.Request) -> web.Response:
        commit, name = self._note(request), request.match_info["file"]
        if self.gated:
            raise web.HTTPForbidden(headers={"X-Error-Code": "GatedRepo"})
        if name not in self.files:
            raise web.HTTPNotFound(headers={"X-Error-Code": "EntryNotFound"})
        if request.method == "GET":
            self.fetched.add(name)
        tag = hashlib.sha1(self.files[name]).hexdigest()
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        return web.Response(body=self.files[name], headers=headers)

    async def _unknown(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        raise web.HTTPNotFound(headers={"X-Error-Code": "RepoNotFound"})


@asynccontextmanager
async def running(hub: HubServer) -> AsyncIterator[HubServer]:
    """Serve on a free port; `hub.url` is the value for HF_ENDPOINT."""
    runner = web.AppRunner(hub.application())
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        hub.url = f"http://{host}:{port}"
        yield hub
    finally:
        await runner.cleanup()
