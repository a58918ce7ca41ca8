"""The parts that the two halves of a movable node share in their process. A pure node shares nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from common.errors import ConfigError
from common.node.role_switch import FIXED_ROLE, CurrentRole
from common.node.serving_model import ServingModel
from common.node.shared_device import SharedDevice


@dataclass(frozen=True, slots=True)
class SharedParts:
    """The parts that a node is built with in addition to its configuration."""

    role: CurrentRole = FIXED_ROLE
    device: SharedDevice | None = None  # held while a plan is launched; None for a pure node
    # Held while a profile is recorded: a process has one recorder at a time.
    recording: threading.Lock = field(default_factory=threading.Lock)
    model: ServingModel | None = None  # of the half that has loaded the weights; None: load them
    loaded: Callable[[ServingModel], None] = lambda model: None  # called once the weights are loaded


ALONE: Final = SharedParts()


def check_process(name: str, movable: bool, shared: SharedParts) -> None:
    """Raise ConfigError for a movable node in the process of a node with one role."""
    if movable and shared.device is None:
        raise ConfigError("movable.nodes", f"{name} is a movable node; start it with deploy/launch_movable")
