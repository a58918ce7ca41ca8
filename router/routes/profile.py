"""POST /workers/NAME/profile of the admin listener: a profile of a node, or of the router process that answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from common.errors import ConfigError, Conflict, InvalidRequest, Unavailable, UnknownNode
from common.messages.node_inbox import MAX_PROFILE_SECONDS, MAX_PROFILE_STEPS
from router.http.errors import json_response
from router.http.request_body import received
from router.nodes.profiles import NodeProfiles
from router.process.stack_samples import write_profile
from router.requests.json_body import decode_json

ROUTER_STEPS = "num_steps counts steps of nodes; leave it out for a router process"


class ProfileRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body. A profile ends after `seconds`, or after `num_steps` steps of the node."""

    seconds: Annotated[float, Meta(gt=0, le=MAX_PROFILE_SECONDS)] = 5.0
    num_steps: Annotated[int, Meta(ge=1, le=MAX_PROFILE_STEPS)] | None = None


_decoder = msgspec.json.Decoder(ProfileRequest)


class ProfileRoutes:
    """The handlers. Each answers once the file is written."""

    def __init__(
        self, name: str, peers: Mapping[str, Path], directory: Callable[[], Path], nodes: NodeProfiles
    ) -> None:
        """
        Args:
            name: of this process.
            peers: the sockets of the other router processes of this host.
            directory: returns where its own profiles are written; may raise ConfigError.
        """
        self._name = name
        self._peers = peers
        self._directory = directory
        self._nodes = nodes
        self._sampling = False

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/workers/{name}/profile", self.profile)

    async def profile(self, request: web.Request) -> web.Response:
        name, asked = request.match_info["name"], ProfileRequest()
        if request.can_read_body:
            async with received(request) as memory:
                asked = decode_json(memory.take(), _decoder)
        if name == self._name:
            return json_response(await self._own(asked))
        if name in self._peers:
            raise UnknownNode(f"{self._name} answers here; ask {name} at {self._peers[name]}", param="name")
        ended = await self._nodes.record(name, asked.seconds, asked.num_steps or MAX_PROFILE_STEPS)
        answer = {
            "name": name,
            "rank": 0,
            "path": ended.path,
            "bytes": ended.file_bytes,
            "seconds": ended.seconds,
            "num_steps": ended.steps,
        }
        return json_response(answer)

    async def _own(self, asked: ProfileRequest) -> dict[str, object]:
        if asked.num_steps is not None:
            raise InvalidRequest(ROUTER_STEPS, param="num_steps")
        if self._sampling:
            raise Conflict(f"a profile of {self._name} is being recorded; try again when it has ended")
        self._sampling, ended = True, threading.Event()
        try:
            directory = self._directory()
            path, samples = await asyncio.to_thread(
                write_profile, self._name, directory, asked.seconds, ended
            )
        except (OSError, ConfigError) as error:
            raise Unavailable(f"{self._name}: no profile was written: {error}") from error
        finally:
            # Whoever asked may be gone, or this process ends: the thread then has nothing to wait for.
            ended.set()
            self._sampling = False
        nbytes = path.stat().st_size
        return {"name": self._name, "path": str(path), "bytes": nbytes, "samples": samples}
