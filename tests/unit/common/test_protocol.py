"""The control protocol's version changes with its messages."""

from __future__ import annotations

import importlib
import pkgutil

import msgspec

from common import messages
from common.messages.protocol import CONTROL_PROTOCOL_VERSION
from kv_transfer.schema_hash import schema_hash

SCHEMAS = {30: "4fd0c09814b0a731"}  # version -> hash of every struct of common/messages


def _structs() -> list[type[msgspec.Struct]]:
    found = {}
    for module in pkgutil.iter_modules(messages.__path__, f"{messages.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not msgspec.Struct:
                found[name] = value
    return [found[name] for name in sorted(found)]


def test_a_change_of_messages_has_a_version_of_its_own() -> None:
    assert len(_structs()) > 20
    assert f"{schema_hash(_structs()):016x}" == SCHEMAS.get(CONTROL_PROTOCOL_VERSION), (
        "a message changed: raise common.messages.protocol.CONTROL_PROTOCOL_VERSION and record the new hash here"
    )
