"""Checks the devices of nodes and of their ranks; whether they exist is found out where they are used."""

from __future__ import annotations

import re
from collections.abc import Collection

from common.config.schema import Cluster, NodeEntry
from common.errors import ConfigError
from common.kv_cache.shard import RANKS

DEVICE = re.compile(r"cpu|cuda(:[0-9]+)?")
SHARING = "process.gpu_sharing"


def check_devices(cluster: Cluster, given: Collection[str]) -> None:
    """Raise ConfigError for devices that are misspelt, contradict each other, or cannot form one node.

    A GPU may belong to several ranks and nodes: what they take of it is checked against its memory at their start.

    Args:
        given: paths of the keys that have a value other than by default.
    """
    for role, nodes in (("prefill", cluster.prefill.nodes), ("decode", cluster.decode.nodes)):
        for index, node in enumerate(nodes):
            path = f"{role}.nodes[{index}]"
            if node.devices:
                _check_list(node, path, given)
            elif not DEVICE.fullmatch(node.device):
                raise _misspelt(f"{path}.device", node.device)
            ranks = len(node.rank_devices)
            if node.expert_parallel and ranks == 1:
                raise ConfigError(
                    f"{path}.expert_parallel",
                    "the only rank of a node has all experts; set tensor_parallel or devices too, or leave it out",
                )


def check_sharing(cluster: Cluster) -> None:
    """Raise ConfigError if the nodes cannot share GPUs in the way that the file asks for."""
    wanted = cluster.process.gpu_sharing
    if wanted == "turns":
        return
    nodes = (*cluster.prefill.nodes, *cluster.decode.nodes)
    if not any(node.on_gpu for node in nodes):
        raise ConfigError(SHARING, f"{wanted} is for nodes on GPUs, and all are on cpu; leave it out")
    for node in nodes:
        if len(node.rank_devices) > 1:
            raise ConfigError(
                SHARING,
                f"{wanted} does not serve nodes of several ranks such as {node.name}, which wait for each other on "
                "their GPUs; write turns",
            )
        if cluster.movable.role_of(node.name) is not None:
            raise ConfigError(
                SHARING, f"{wanted} does not serve movable nodes such as {node.name}; write turns"
            )


def _check_list(node: NodeEntry, path: str, given: Collection[str]) -> None:
    key, count = f"{path}.devices", len(node.devices)
    for index, device in enumerate(node.devices):
        if not DEVICE.fullmatch(device):
            raise _misspelt(f"{key}[{index}]", device)
    if count not in RANKS:
        raise ConfigError(
            key, f"{count} ranks cannot divide a model; name {', '.join(map(str, RANKS))} devices"
        )
    if len({device == "cpu" for device in node.devices}) > 1:
        raise ConfigError(
            key, "the ranks of a node are all on cpu or all on cuda devices, since they exchange sums"
        )
    if f"{path}.device" in given:
        raise ConfigError(
            f"{path}.device", "devices already names the device of every rank; leave out one of the two"
        )
    if f"{path}.tensor_parallel" in given and node.tensor_parallel != count:
        raise ConfigError(
            f"{path}.tensor_parallel",
            f"{node.tensor_parallel} ranks contradict the {count} names in devices; leave out one of the two",
        )


def _misspelt(path: str, device: str) -> ConfigError:
    return ConfigError(path, f"{device!r} is not a device; write cpu, cuda or cuda:N")
