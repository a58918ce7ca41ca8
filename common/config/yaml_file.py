"""A strict YAML reader that refuses duplicate keys, tags that build objects, and documents that are not mappings.

Only `true` and `false` are booleans, as in YAML 1.2; other boolean words of YAML 1.1 are strings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
# SafeLoader's constructors raise these too: 2024-13-45, !!bool maybe, !!int '', !!timestamp soon, !!map [a], brackets
# without end.
_UNREADABLE = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)


BOOL = "tag:yaml.org,2002:bool"


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that raises on duplicate keys, of which plain YAML silently keeps the last one."""

    # Without SafeLoader's booleans; those of YAML 1.2 are added below.
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
                raise ConfigError(
                    key, f"line {line}: the key appears twice (first on line {seen[key]}); remove one"
                )
            seen[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_implicit_resolver(BOOL, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def require_utf8(path: Path) -> None:
    """Raise ConfigError for a path that neither a cluster file nor a log could name."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigError("", f"the path {str(path)!a} is not UTF-8; rename it") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the file's top-level mapping. Raises ConfigError, with the file, for anything else."""
    require_utf8(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError("", f"{path} is larger than {MAX_FILE_BYTES} bytes: not a cluster file")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError("", f"cannot read {path}: {reason}") from error
    return parse_mapping(text, str(path))


def parse_mapping(text: str, origin: str) -> dict[str, Any]:
    """Parse a text as `read_mapping` parses a file."""
    data = parse_yaml(text, origin)
    if not isinstance(data, dict):
        raise ConfigError("", f"{origin} must contain a mapping with at least `model: {{path: ...}}`")
    return data


def parse_yaml(text: str, origin: str) -> Any:
    """Return any YAML document. Raises ConfigError."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506, TID251 - a SafeLoader subclass
    except _UNREADABLE as error:
        raise ConfigError("", f"{origin} is not YAML: {_problem(error)}") from error


def _problem(error: Exception) -> str:
    """Say in one line what is wrong and where, without the excerpt that PyYAML adds."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    mark, begun = error.problem_mark, error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    if not error.context:
        return place
    return f"{place} ({error.context}" + (f" that begins on line {begun.line + 1})" if begun else ")")


def parse_scalar(text: str) -> Any:
    """Return the value of an environment variable or --set, parsed as YAML."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506, TID251 - a SafeLoader subclass
    except _UNREADABLE:
        return text
