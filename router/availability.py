"""Tells whether the router takes requests now, and describes the model as its nodes serve it now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from common.errors import Unavailable
from common.messages.identity import ROLES, Role
from common.observability.logs import Log
from router.core import Core
from router.requests.checks import ServedModel

SHUTTING_DOWN = "this router is shutting down"


class ServedModels(Protocol):
    """Describes the model to handlers, which ask at each request."""

    def served(self) -> ServedModel:
        """Return the served model, with the context length that every node supports."""
        ...

    def admitting(self) -> ServedModel:
        """Return `served()` for a request that generates. Raises Unavailable while no requests are accepted."""
        ...


class Availability:
    """The state that decides whether requests are accepted. Implements `ServedModels`."""

    def __init__(
        self, model: ServedModel, core: Core, configured: Mapping[Role, Sequence[str]], log: Log
    ) -> None:
        """`configured`: names and patterns of the nodes of the cluster file."""
        self._model = model
        self._limited = model  # the model as it was served last
        self._core = core
        self._configured = configured
        self._log = log
        self.draining = False
        # Drains while other router processes take new connections: requests on open ones are accepted.
        self.leaving = False
        self.paused = False  # refuses new requests as `draining` does, but an operator can resume it

    def served(self) -> ServedModel:
        limit = self._core.registry.max_model_len
        if limit is None:
            return self._model
        limit = min(limit, self._model.max_model_len)
        if self._limited.max_model_len != limit:
            self._limited = replace(self._model, max_model_len=limit)
        return self._limited

    def admitting(self) -> ServedModel:
        if self.draining:
            raise Unavailable(f"{SHUTTING_DOWN}; try again in a few seconds")
        if self.paused:
            raise Unavailable(
                "this router is paused and takes no new requests until its operator resumes it; use another router"
            )
        return self.served()

    def not_ready(self) -> str | None:
        """Return why the router cannot serve requests now; None if it can."""
        if self.draining or self.leaving or self.paused:
            return "draining"
        registry = self._core.registry
        for role in ROLES:
            if not registry.count(role):
                expected = registry.expected(role)
                back = f"; expected back: {', '.join(expected)}" if expected else ""
                return f"no {role} node has been up for {registry.missing_for(role):.0f} s{back}"
        return None

    def missing_nodes(self) -> list[dict[str, str]]:
        """Return name and role of the entries of the cluster file without a node that takes requests now."""
        # In either role, where a node can change it.
        up = {node.pattern or node.name for node in self._core.registry if node.state == "up"}
        configured = [(role, name) for role, names in self._configured.items() for name in names]
        return [{"name": name, "role": role} for role, name in configured if name not in up]

    def set_paused(self, paused: bool) -> None:
        """Pause or resume the router on behalf of an operator."""
        self.paused = paused
        self._log.info("paused" if paused else "resumed", requests=self._core.dispatcher.active)
