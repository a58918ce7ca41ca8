"""Merges file, environment and command line into one frozen Cluster, and records the origin of each value.

Precedence: --set > environment (TANDEM_ROUTER_PORT) > file > default. Nothing is rewritten silently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from common.config.cluster_schema import cluster_schema
from common.config.devices import check_devices, check_sharing
from common.config.http_exposure import check_http
from common.config.keys import element_struct, read_override, refuse_unknown, variable_path
from common.config.kv_events import check_kv_events
from common.config.movable import check_local_prefill, check_movable
from common.config.node_entries import check_names, check_own_address
from common.config.router_processes import CONTROL, check_routers, router_hosts
from common.config.schema import Cluster, Speculation
from common.config.unread import refuse_unread, unread_keys
from common.config.yaml_file import parse_scalar, read_mapping
from common.errors import ConfigError
from common.messages.identity import ROLES
from common.node_names import FOUND
from common.resolved_path import resolved_path
from common.speculation.table import ALGORITHMS, algorithm, algorithms

ADDRESS = re.compile(
    r"auto|ipc://.+|(?:tcp|dns|endpointslices)://(\[[^]\s]+\]|[^:/\s]+):(?P<port>[0-9]{1,5})"
)
HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)+")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A cluster and the origin of each value that is not a default: path -> "file:...", "env:...", "--set"."""

    cluster: Cluster
    file: Path
    origins: Mapping[str, str]

    @property
    def model_path(self) -> Path:
        return self.relative(self.cluster.model.path)

    @property
    def draft_path(self) -> Path | None:
        """Directory of the draft model; None if the algorithm has none."""
        draft = self.cluster.speculation.draft_model_path
        return None if draft is None else self.relative(draft)

    @property
    def manifests(self) -> tuple[tuple[Path, Path], ...]:
        """(model directory, list of its files' SHA-256 sums) of target and draft, if a list is given."""
        given = (
            (self.model_path, self.cluster.model.manifest),
            (self.draft_path, self.cluster.speculation.draft_manifest),
        )
        return tuple((path, self.relative(text)) for path, text in given if path is not None and text)

    @property
    def chat_template_path(self) -> Path | None:
        """File of a chat template that replaces the model's own; None: use the model's."""
        template = self.cluster.model.chat_template
        return None if template is None else self.relative(template)

    @property
    def keys_path(self) -> Path | None:
        """Directory of the link keys; None: only loopback, with keys in the run directory."""
        keys = self.cluster.security.keys
        return None if keys is None else self.relative(keys)

    @property
    def api_keys_path(self) -> Path | None:
        """File of the hashed API keys; None: clients need no key."""
        keys = self.cluster.security.api_keys
        return None if keys is None else self.relative(keys)

    @property
    def tls_paths(self) -> tuple[Path, Path, Path | None] | None:
        """Certificate, private key, and the CA of client certificates; None: plain HTTP."""
        tls = self.cluster.router.tls
        if tls.cert is None or tls.key is None:
            return None
        authority = None if tls.client_ca is None else self.relative(tls.client_ca)
        return self.relative(tls.cert), self.relative(tls.key), authority

    def relative(self, text: str) -> Path:
        """Resolve a path of the cluster file, which is relative to the file's directory."""
        path = Path(os.path.expanduser(text))
        return path if path.is_absolute() else resolved_path(self.file.parent / path)

    def rows(self) -> Iterator[tuple[str, object, str]]:
        """Yield (path, value, origin) of every key, in schema order."""
        for path, value in _leaves(msgspec.to_builtins(self.cluster), ""):
            yield path, value, self.origins.get(path, "default")


def load_cluster(
    file: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Resolved:
    """Read and check a cluster file. `overrides` are arguments of --set, such as "router.port=8001".

    Raises ConfigError with the key's path and the remedy.
    """
    file = resolved_path(Path(file))
    data = read_mapping(file)
    schema = cluster_schema()
    refuse_unknown(schema, data)
    given: dict[str, str] = {}  # path -> origin, of values that override the file
    for name, text in sorted((os.environ if environ is None else environ).items()):
        variable = variable_path(schema, name, text)
        if variable is not None:
            _assign(data, variable, parse_scalar(text))
            given[variable] = f"env:{name}"
    for item in overrides:
        path, text = read_override(schema, item)
        _assign(data, path, parse_scalar(text))
        given[path] = "--set"
    refuse_unknown(schema, data)  # again: the environment or --set may have given a list of nodes
    try:
        cluster = msgspec.convert(data, schema)
    except msgspec.ValidationError as error:
        _refuse_other_names(data)
        raise _readable(error, given) from error
    for path, value in _leaves(data, ""):
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(each, str) and "\0" in each for each in texts):
            raise ConfigError(
                path, "a value must not contain a zero byte, which ends names of files; remove it"
            )
    origins = {path: _origin(path, given, f"file:{file.name}") for path, _ in _leaves(data, "")}
    check_movable(cluster)
    check_names(cluster)
    check_own_address(cluster)
    check_devices(cluster, origins)
    check_sharing(cluster)
    _check_addresses(cluster)
    check_routers(cluster.router)
    refuse_unread(unread_keys(cluster), origins)
    check_local_prefill(cluster)
    _check_lengths(cluster)
    _check_health(cluster)
    _check_speculation(cluster)
    _check_image_hosts(cluster)
    _check_prompt_graphs(cluster)
    check_http(cluster)
    check_kv_events(cluster)
    resolved = Resolved(cluster, file, origins)
    _check_roots(resolved)
    return resolved


def _origin(path: str, given: Mapping[str, str], default: str) -> str:
    """Return the origin of `path`, or of the list that contains it."""
    return next(
        (origin for key, origin in given.items() if path == key or path.startswith(key + "[")), default
    )


def _check_roots(resolved: Resolved) -> None:
    roots = [resolved_path(resolved.relative(root)) for root in resolved.cluster.model.allowed_roots]
    places = (("model.path", resolved.model_path), ("speculation.draft_model_path", resolved.draft_path))
    for key, given in places:
        if not roots or given is None:
            continue
        path = resolved_path(given)
        if not any(path.is_relative_to(root) for root in roots):
            raise ConfigError(
                key,
                f"{path} is in none of model.allowed_roots ({', '.join(map(str, roots))}); move it there, "
                "or add its directory",
            )


def _check_addresses(cluster: Cluster) -> None:
    """Check the form of addresses; whether they exist is found out where they are used."""
    addresses = {
        f"prefill.nodes[{i}].peer_address": n.peer_address for i, n in enumerate(cluster.prefill.nodes)
    }
    controls = router_hosts(cluster.router)
    places = [*((CONTROL, each) for each in controls), *addresses.items()]
    for path, address in places:
        found = ADDRESS.fullmatch(address)
        least = 1 if path == CONTROL else 0  # 0 takes a free port, which only decode nodes learn
        wrong = found is None or (path != CONTROL and address.startswith(FOUND))
        if found is None or wrong or not least <= int(found["port"] or 1) <= 65_535:
            raise ConfigError(
                path,
                f"{address!r} is not an address; write auto, ipc://PATH or tcp://HOST:PORT (an IPv6 address in "
                "brackets), with the port that the others connect to",
            )
    hosts = {f"decode.nodes[{i}].host": n.host for i, n in enumerate(cluster.decode.nodes)}
    for path, host in {"router.host": cluster.router.host, **hosts}.items():
        if host.startswith("["):
            raise ConfigError(
                path, f"{host} is a host without a port; write it without brackets, as {host.strip('[]')}"
            )


def _check_lengths(cluster: Cluster) -> None:
    """Check that a pool of known size fits a request of the length that the file asks for."""
    for role, section in (("prefill", cluster.prefill), ("decode", cluster.decode)):
        tokens, auto = section.pool_tokens, ""
        if tokens == "auto":
            if any(node.on_gpu for node in section.nodes):
                continue
            tokens, auto = section.CPU_POOL_TOKENS, "auto: "
        _check_length(f"{role}.pool_tokens", tokens, cluster, auto)
    for role in ROLES:
        own = cluster.movable.tokens_of(role)
        if own != "auto":
            _check_length(f"movable.{role}_pool_tokens", own, cluster)


def _check_length(key: str, tokens: int, cluster: Cluster, auto: str = "") -> None:
    wanted, page = cluster.model.max_model_len, cluster.kv.page_size
    if wanted is not None and tokens // page * page < wanted:
        raise ConfigError(
            key,
            f"{auto}{tokens} tokens in pages of {page} hold no request of model.max_model_len, {wanted}: "
            f"write at least {-(-wanted // page) * page}, or set model.max_model_len to at most "
            f"{tokens // page * page}",
        )


def _check_health(cluster: Cluster) -> None:
    health = cluster.health
    for name, timeout in (("node_timeout", health.node_timeout), ("router_timeout", health.router_timeout)):
        if timeout < 2 * health.heartbeat_interval:
            raise ConfigError(
                f"health.{name}",
                f"{timeout:g} s leaves no room for two heartbeats (health.heartbeat_interval is "
                f"{health.heartbeat_interval:g} s): healthy nodes would be given up",
            )
    if health.router_timeout > health.node_timeout:
        raise ConfigError(
            "health.router_timeout",
            f"{health.router_timeout:g} s is longer than health.node_timeout, {health.node_timeout:g} s: a node "
            "that is cut off would go on with requests that the router has placed elsewhere; "
            f"write at most {health.node_timeout:g}",
        )


def _refuse_other_names(data: Mapping[str, Any]) -> None:
    """Raise ConfigError with tandem's name of an algorithm or backend that the file names as other servers do."""
    section = data.get("speculation")
    given = section.get("algorithm") if isinstance(section, dict) else None
    name = given if isinstance(given, str) else ""
    others = {other: each.name for each in algorithms() for other in each.other_names}
    ours = others.get(name.lower(), name.lower())
    if ours != name and ours in ALGORITHMS:
        raise ConfigError("speculation.algorithm", f"{name} is called {ours} here; write {ours}")
    prefill = data.get("prefill")
    if isinstance(prefill, dict) and prefill.get("graphs") == "tc_piecewise":
        raise ConfigError("prefill.graphs", "tc_piecewise is called piecewise here; write piecewise")


def _check_prompt_graphs(cluster: Cluster) -> None:
    section = cluster.prefill
    if section.enforce_graphs and section.graphs == "none":
        raise ConfigError(
            "prefill.enforce_graphs", "true contradicts prefill.graphs none; leave out one of the two"
        )
    if section.compiler is not None and section.graphs != "piecewise":
        raise ConfigError(
            "prefill.compiler",
            f"{section.compiler} compiles piecewise graphs, and prefill.graphs is {section.graphs}; "
            "write graphs: piecewise, or leave out the compiler",
        )


def _check_image_hosts(cluster: Cluster) -> None:
    for index, host in enumerate(cluster.router.images.fetch_hosts):
        if not HOST_NAME.fullmatch(host) or host.replace(".", "").isdigit():
            raise ConfigError(
                f"router.images.fetch_hosts[{index}]",
                f"{host!r} is not the name of a host; write it without scheme, port and path, and no address",
            )


def _check_speculation(cluster: Cluster) -> None:
    section, record = cluster.speculation, algorithm(cluster.speculation.algorithm)
    _check_draft_tree(section)
    if section.adaptive != "none" and (not record.adaptive or section.topk > 1):
        able = ", ".join(each.name for each in algorithms() if each.adaptive)
        raise ConfigError(
            "speculation.adaptive",
            f"chains of a draft model ({able} with topk 1) can change their length; write none",
        )
    key = "speculation.draft_model_path"
    if record.directory is not None:
        if section.draft_model_path is None:
            raise ConfigError(key, f"{section.algorithm} needs a draft model; name its directory")
    elif section.draft_model_path is not None:
        raise ConfigError(
            key,
            f"algorithm {section.algorithm} has no draft model; remove the path or set algorithm to eagle3",
        )


def _check_draft_tree(section: Speculation) -> None:
    steps, topk, nodes = section.steps, section.topk, section.draft_tokens
    if topk == 1:
        if nodes not in (None, steps + 1):
            raise ConfigError(
                "speculation.draft_tokens", f"a chain of {steps} steps is {steps + 1} tokens; leave it out"
            )
        return
    if not algorithm(section.algorithm).trees:
        raise ConfigError("speculation.topk", f"{section.algorithm} drafts chains; topk must be 1")
    most = topk + (steps - 1) * topk * topk + 1
    if nodes is None or nodes > most:
        raise ConfigError(
            "speculation.draft_tokens",
            f"give the size of the tree, 2 to {most} with steps {steps} and topk {topk}",
        )


def _readable(error: msgspec.ValidationError, given: Mapping[str, str]) -> ConfigError:
    text, _, path = str(error).partition(" - at `$")
    path = re.sub(r"\[\.\.\.\]", "[]", path.rstrip("`").lstrip("."))
    if text.startswith("Invalid enum value"):
        text = f"{text}; write {', '.join(map(str, _words(path)))}"
    elif text.startswith("Expected `bool`"):
        text = f"{text}; write true or false"
    origin = _origin(path, given, "")
    return ConfigError(path, f"{text} (from {origin})" if origin else text)


def _words(path: str) -> list[object]:
    """Return the values that a key with a fixed set of words accepts."""
    kind: Any = cluster_schema()
    for part in path.split("."):
        name, bracket, _ = part.partition("[")
        types = {field.name: field.type for field in msgspec.structs.fields(kind)}
        kind = element_struct(kind, name) if bracket else types[name]
    words, others = list[object](), False
    for part in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        words += get_args(part) if get_origin(part) is Literal else ()
        others |= get_origin(part) is Annotated
    return [*words, *(["a number"] if others else [])]


def _assign(data: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    for part in parents:
        child = data.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(path, f"{part} is not a section in the file")
        data = child
    data[last] = value


def _leaves(data: Any, prefix: str) -> Iterator[tuple[str, object]]:
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(data, (list, tuple)) and data and isinstance(data[0], dict):
        for index, value in enumerate(data):
            yield from _leaves(value, f"{prefix}[{index}]")
    else:
        yield prefix, data
