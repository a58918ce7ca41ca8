"""YAML that refuses what YAML forgives: duplicate keys, tags that build objects, documents that are not mappings.

Words are words: of YAML 1.1's booleans `true` and `false` alone are read as such, as YAML 1.2 has it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
# SafeLoader's constructors raise these, too: 2024-13-45, !!bool maybe, !!timestamp soon, brackets without end
_UNREADABLE = (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError)


BOOL = "tag:yaml.org,2002:bool"


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that raises on duplicate keys (plain YAML keeps the last one silently)."""

    # without the booleans; then those of YAML 1.2
    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML has it
        first: [(tag, pattern) for tag, pattern in known if tag != BOOL]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConfigError(str(key), f"line {key_node.start_mark.line + 1}: keys are names")
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(key, f"line {line}: given twice (first on line {seen[key]}); remove one")
            seen[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_implicit_resolver(BOOL, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def read_mapping(path: Path) -> dict[str, Any]:
    """The file's top-level mapping. Raises ConfigError for anything else, naming the file."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError("", f"{path} is larger than {MAX_FILE_BYTES} bytes: not a cluster file")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("", f"cannot read {path}: {error}") from error
    return parse_mapping(text, str(path))


def parse_mapping(text: str, origin: str) -> dict[str, Any]:
    """As read_mapping, from text."""
    data = parse_yaml(text, origin)
    if not isinstance(data, dict):
        raise ConfigError("", f"{origin} must hold a mapping with at least `model: {{path: ...}}`")
    return data


def parse_yaml(text: str, origin: str) -> Any:
    """Any document. Raises ConfigError."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506, TID251 - a SafeLoader subclass
    except _UNREADABLE as error:
        raise ConfigError("", f"{origin} is not YAML: {error}") from error


def parse_scalar(text: str) -> Any:
    """A value from an environment variable or --set, read as YAML reads it."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506, TID251 - a SafeLoader subclass
    except _UNREADABLE:
        return text
