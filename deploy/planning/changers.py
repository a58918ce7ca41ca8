"""The two ways to change a cluster: to move nodes between roles, or to ask Kubernetes for replicas."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec

from common.errors import ConfigError, NoAnswer
from common.kubernetes_api import ApiServer, read_body
from common.messages.identity import ROLES, Role
from deploy.planning.decision import Move, Scale
from deploy.planning.routers import Routers
from deploy.planning.settings import KubernetesTarget

ANSWER_SECONDS = 10.0
MERGE_PATCH = "application/merge-patch+json"
MAX_BYTES = 1 << 20


class Changer(Protocol):
    """Carries out decisions."""

    async def check(self, info: Mapping[str, Any]) -> None:
        """Raise ConfigError if it can change nothing, or NoAnswer if that is not known yet.

        `info`: /server_info of a router that is ready.
        """
        ...

    async def replicas(self) -> Mapping[Role, int]:
        """Return the replicas that are asked for; empty if it moves nodes. Raises OSError, NoAnswer or ConfigError."""
        ...

    async def apply(self, change: Move | Scale) -> str:
        """Make a change and return what was answered. Raises OSError, NoAnswer or ConfigError."""
        ...


class RoleChanger:
    """Moves nodes by the routers' admin listener."""

    def __init__(self, routers: Routers, change_timeout: float) -> None:
        self._routers = routers
        self._timeout = change_timeout

    async def check(self, info: Mapping[str, Any]) -> None:
        if not any(node.get("movable") for node in info["nodes"]):
            if missing := ", ".join(sorted(node["name"] for node in info.get("missing_nodes", ()))):
                raise NoAnswer(f"no movable node is registered, and these nodes are not up: {missing}")
            raise ConfigError(
                "kubernetes",
                "no node of this cluster can change its role, and there is no Kubernetes to ask for replicas: list "
                "nodes in movable.nodes of the cluster file, or set this key",
            )
        if "incarnation" not in info:
            raise ConfigError(
                "",
                "roles are changed on the admin listener, which this address is not: give the cluster file on the "
                "router's host, or the address of router.admin",
            )

    async def replicas(self) -> Mapping[Role, int]:
        return {}

    async def apply(self, change: Move | Scale) -> str:
        assert isinstance(change, Move)
        return await self._routers.change_role(change.name, change.role, self._timeout)


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""


class _Replicas(msgspec.Struct, frozen=True):
    replicas: int = 0


class _ScaleObject(msgspec.Struct, frozen=True):
    """autoscaling/v1 Scale, as every subresource `scale` has it."""

    metadata: _Metadata
    spec: _Replicas


class KubernetesScaler:
    """Sets replicas by the subresource `scale`. The token is read again for each request, because it rotates."""

    def __init__(self, target: KubernetesTarget, environ: Mapping[str, str] = os.environ) -> None:
        """Read where the API server is. Raises ConfigError if that or the credentials are not known."""
        self._api = ApiServer(target.server, Path(target.credentials), environ)
        namespace = target.namespace or self._api.read("namespace")
        self._urls: dict[Role, str] = {
            "prefill": self._url(target.prefill, namespace),
            "decode": self._url(target.decode, namespace),
        }
        self._api.headers()
        self._versions: dict[Role, str] = {}

    async def check(self, info: Mapping[str, Any]) -> None:
        await self.replicas()

    async def replicas(self) -> Mapping[Role, int]:
        found = [await self._ask("GET", role) for role in ROLES]
        self._versions = {
            role: each.metadata.resource_version for role, each in zip(ROLES, found, strict=True)
        }
        return {role: each.spec.replicas for role, each in zip(ROLES, found, strict=True)}

    async def apply(self, change: Move | Scale) -> str:
        """Set the replicas, unless somebody else has changed them since they were read."""
        assert isinstance(change, Scale)
        body = {
            "metadata": {"resourceVersion": self._versions[change.role]},
            "spec": {"replicas": change.replicas},
        }
        answer = await self._ask("PATCH", change.role, body)
        return f"{answer.spec.replicas} replicas"

    def _url(self, target: str, namespace: str) -> str:
        group, version, resource, name = target.split("/")
        return f"{self._api.url}/apis/{group}/{version}/namespaces/{namespace}/{resource}/{name}/scale"

    async def _ask(self, method: str, role: Role, body: Any = None) -> _ScaleObject:
        url = self._urls[role]
        headers = await asyncio.to_thread(self._api.headers)
        if body is not None:
            headers["Content-Type"] = MERGE_PATCH
        data = None if body is None else msgspec.json.encode(body)
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            aiohttp.ClientSession(headers=headers) as session,
            session.request(method, url, data=data, ssl=self._api.tls()) as response,
        ):
            answer = await read_body(response, MAX_BYTES)
            if response.status in (401, 403, 404):
                raise ConfigError(
                    f"kubernetes.{role}",
                    f"{method} {url} was answered {response.status}: it needs to exist, and the service account the "
                    "verbs get and patch for its subresource scale",
                )
            if response.status != 200:
                raise NoAnswer(f"{method} {url} was answered {response.status}")
        try:
            return msgspec.json.decode(answer, type=_ScaleObject)
        except msgspec.MsgspecError as error:
            raise NoAnswer(f"{method} {url} was answered with no Scale: {error}") from None
