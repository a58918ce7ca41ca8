"""The schema of a whole cluster file: schema.py with the names in its tables, and the keys of all transports."""

from __future__ import annotations

import functools
from typing import Any, Literal

import msgspec

from common.config.schema import Cluster, PlacementSection, RouterSection, Speculation, Transfer
from common.config.transports import TRANSPORTS, transport_kinds
from common.placements import PLACEMENTS
from common.speculation.table import ALGORITHMS


def cluster_schema() -> type[Cluster]:
    """Return `Cluster` with the names of the tables, and with the keys of all transports in its section `transfer`."""
    return _schema(tuple(TRANSPORTS), tuple(ALGORITHMS), tuple(PLACEMENTS))


@functools.cache
def _schema(
    transports: tuple[str, ...], algorithms: tuple[str, ...], policies: tuple[str, ...]
) -> type[Cluster]:
    transport = ("transport", Literal["auto", *transports], "auto")
    transfer = _extended(Transfer, [transport, *_option_fields()])
    speculation = _extended(Speculation, [("algorithm", Literal[algorithms], "none")])
    policy: Any = Literal[policies]
    defaults = PlacementSection()
    placement = _extended(
        PlacementSection, [("prefill", policy, defaults.prefill), ("decode", policy, defaults.decode)]
    )
    router = _extended(RouterSection, [("placement", placement, placement())])
    sections = [
        ("router", router, router()),
        ("speculation", speculation, speculation()),
        ("transfer", transfer, transfer()),
    ]
    return _extended(Cluster, sections)


def _option_fields() -> list[tuple[str, Any, Any]]:
    """Return (name, type, default) of the transports' own keys; a key of several transports appears once."""
    fields: dict[str, tuple[str, Any, Any]] = {}
    for kind in transport_kinds():
        for field in msgspec.structs.fields(kind.options):
            made = (field.encode_name, field.type, field.default)
            if fields.setdefault(field.name, made) != made:
                raise TypeError(f"transports declare transfer.{field.name} in different ways")
    return list(fields.values())


def _extended(base: type[Any], fields: list[tuple[str, Any, Any]]) -> type[Any]:
    """Return `base` with further fields, or with other types of existing ones."""
    return msgspec.defstruct(
        base.__name__,
        fields,
        bases=(base,),
        module=base.__module__,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )
