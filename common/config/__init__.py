"""The cluster file: its schema as typed structs, the loader, the table of transports, the plan of each node."""

from common.config.load import Resolved, load_cluster
from common.config.schema import Cluster, DecodeNodeEntry, DecodeSection, PrefillNodeEntry, PrefillSection

__all__ = [
    "Cluster",
    "DecodeNodeEntry",
    "DecodeSection",
    "PrefillNodeEntry",
    "PrefillSection",
    "Resolved",
    "load_cluster",
]
