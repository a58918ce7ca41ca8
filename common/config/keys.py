"""The keys of a cluster file, and the answers to unknown names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec

from common.config.foreign import foreign_answer
from common.config.schema import Cluster
from common.config.section import Section, fields_of
from common.errors import ConfigError
from common.messages.identity import ROLES

ENV_PREFIX = "TANDEM_"
# read by deploy/setup and deploy/env.sh
ENV_OF_SCRIPTS = ("TANDEM_PYTHON", "TANDEM_TORCH", "TANDEM_TORCH_INDEX")
SURE = 0.8  # similarity, up to 1, from which a name of another section is suggested
SERVICE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")


def schema_paths(struct: type[Section], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (environment_style, dotted.path) of every key; a list of nodes is one key."""
    for field in fields_of(struct):
        path = f"{prefix}{field.name}"
        if is_section(field.type):
            yield from schema_paths(field.type, path + ".")
        else:
            yield path.replace(".", "_"), path


@cache
def cluster_keys(schema: type[Cluster]) -> Mapping[str, str]:
    """Return every key of a cluster file: environment style -> dotted path."""
    return dict(schema_paths(schema))


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def refuse_unknown(schema: type[Cluster], data: Any) -> None:
    """Raise ConfigError for the first key of `data`, the content of a file, that the schema does not have."""
    _refuse_unknown(schema, schema, data, "")


def _refuse_unknown(schema: type[Cluster], struct: type[Section], data: Any, prefix: str) -> None:
    if not isinstance(data, dict):
        return
    fields = {f.name: f.type for f in fields_of(struct)}
    for key, value in data.items():
        path = f"{prefix}{key}"
        if key not in fields:
            raise ConfigError(path, f"unknown key{_remedy(schema, path, [prefix + name for name in fields])}")
        if is_section(fields[key]):
            if value is None:
                raise ConfigError(path, "the section is empty; give it keys or remove it")
            _refuse_unknown(schema, fields[key], value, path + ".")
        elif isinstance(value, list):
            element = element_struct(struct, key)
            for index, item in enumerate(value):
                if element is not None:
                    _refuse_unknown(schema, element, item, f"{path}[{index}].")


def read_override(schema: type[Cluster], item: str) -> tuple[str, str]:
    """Return (path, text of the value) of an argument of --set. Raises ConfigError that says what to write."""
    path, separator, text = item.partition("=")
    path = path.strip()
    keys = cluster_keys(schema).values()
    if path in keys:
        if not separator:
            raise ConfigError(
                path, f"--set takes KEY=VALUE, and the value is missing; write --set {path}=VALUE"
            )
        return path, text
    if not path:
        raise ConfigError("", "--set takes KEY=VALUE, as in --set router.port=8001")
    within = _keys_below(schema, path)
    if within:
        raise ConfigError(path, f"it is a section; set one of its keys: {', '.join(within)}")
    section, _, _ = path.rpartition(".")
    raise ConfigError(
        path, f"unknown key{_remedy(schema, path, _keys_below(schema, section), f'={text}' if text else '')}"
    )


def variable_path(schema: type[Cluster], name: str, value: str) -> str | None:
    """Return the key that an environment variable sets; None if it is not for tandem. Raises ConfigError for a typo.

    Kubernetes sets variables for each service: one called `tandem-router` sets TANDEM_ROUTER_SERVICE_HOST, and one
    called `tandem` sets TANDEM_PORT=tcp://...
    """
    if not name.startswith(ENV_PREFIX) or name in ENV_OF_SCRIPTS or SERVICE.search(name):
        return None
    keys, key = cluster_keys(schema), name.removeprefix(ENV_PREFIX).lower()
    if key in keys:
        return keys[key]
    sections = [field.name for field in fields_of(schema)]
    section = next((each for each in sections if key.startswith(f"{each}_")), None)
    own = [each for each, path in keys.items() if path.rpartition(".")[2] == key and "://" not in value]
    foreign = None if own or section is None else foreign_answer(key.removeprefix(f"{section}_"))
    close = own or difflib.get_close_matches(key, keys, n=1, cutoff=SURE)
    if foreign is not None:
        answer = foreign
    elif close:
        answer = f"did you mean {' or '.join(ENV_PREFIX + each.upper() for each in close)}?"
    elif section is not None:
        known = [path for path in keys.values() if path.startswith(f"{section}.")]
        answer = f"known are {', '.join(ENV_PREFIX + path.replace('.', '_').upper() for path in known)}"
    else:
        return None
    raise ConfigError(
        name, f"this environment variable sets no key: {answer} (if it is not for tandem, unset it)"
    )


def option_answer(schema: type[Cluster], option: str) -> str | None:
    """Return what to write for a command-line option that is a key, or an option of another server; None if neither."""
    name, separator, value = option.partition("=")
    if not name.startswith("--"):
        return None
    last = name.removeprefix("--").replace("-", "_")
    found = [each for each in cluster_keys(schema).values() if each.rpartition(".")[2] == last]
    if found:
        value = value if separator else "VALUE"
        return f"it is a key; set it with {' or '.join(f'--set {each}={value}' for each in found)}"
    return foreign_answer(name)


def _keys_below(schema: type[Cluster], section: str) -> list[str]:
    return [path for path in cluster_keys(schema).values() if path.startswith(f"{section}.")]


def _remedy(schema: type[Cluster], path: str, here: list[str], value: str = "") -> str:
    """Return what to write instead. `here` are the keys of its section, with their paths."""
    section, _, last = path.rpartition(".")
    elsewhere = [each for each in cluster_keys(schema).values() if each.rpartition(".")[2] == last]
    if elsewhere and section in ROLES:
        # The key of the other role is about something else.
        return f"; only {elsewhere[0]} exists; known here: {', '.join(here)}"
    if elsewhere:
        return f"; write {' or '.join(each + value for each in elsewhere)}"
    foreign = foreign_answer(last)
    if foreign is not None:
        return f": {foreign}"
    of_nodes = [role for role in ROLES if last in _node_keys(schema, role)]
    if of_nodes and "[" not in section:
        roles = [section] if section in of_nodes else of_nodes
        lists = " or ".join(
            f"{role}.nodes=[{{name: {role}-0, {last}{value.replace('=', ': ')}}}]" for role in roles
        )
        return f"; it is a key of each node, as in {lists}"
    close = _closest(last, here) or difflib.get_close_matches(path, cluster_keys(schema).values(), 1, SURE)
    if close:
        return f"; did you mean {close[0]!r}?"
    if here:
        return f"; known here: {', '.join(here)}"
    sections = ", ".join(field.name for field in fields_of(Cluster))
    return f"; the sections are {sections}, and deploy/config shows every key"


def _node_keys(schema: type[Cluster], role: str) -> tuple[str, ...]:
    """Return the keys of an entry in the list of nodes of a role."""
    sections = {field.name: field.type for field in fields_of(schema)}
    entry = element_struct(sections[role], "nodes")
    assert entry is not None
    return entry.__struct_fields__


def _closest(last: str, paths: list[str]) -> list[str]:
    """Return the path whose last name resembles `last`."""
    names = {path.rpartition(".")[2]: path for path in paths}
    return [names[name] for name in difflib.get_close_matches(last, names, n=1)]


@cache
def element_struct(struct: type[Section], key: str) -> type[Section] | None:
    """Return the struct of a `tuple[Struct, ...]` field, else None."""
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        kind: Any = field.type
        if field.name == key and isinstance(kind, msgspec.inspect.VarTupleType):
            item = kind.item_type
            if isinstance(item, msgspec.inspect.StructType) and issubclass(item.cls, Section):
                return item.cls
    return None
