"""How much memory a node may count on: that of the machine, or what its container is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.engine.host_memory import GIB, host_memory

MACHINE = host_memory(Path("/nonexistent"), Path("/nonexistent"))
SMALL = 64 << 20


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"memory.max": f"{SMALL}\n"}, SMALL),
        ("0::/a/b\n", {"a/memory.max": f"{SMALL}\n", "a/b/memory.max": "max\n"}, SMALL),
        ("0::/a/b\n", {"a/memory.max": f"{2 * SMALL}", "a/b/memory.max": f"{SMALL}"}, SMALL),
        ("0::/of/the/host\n", {"memory.max": f"{SMALL}\n"}, SMALL),
        ("4:cpu,memory:/pod\n", {"memory/pod/memory.limit_in_bytes": f"{SMALL}\n"}, SMALL),
        ("4:memory:/of/the/host\n0::/\n", {"memory/memory.limit_in_bytes": f"{SMALL}\n"}, SMALL),
        ("3:cpu:/pod\n", {"memory/pod/memory.limit_in_bytes": f"{SMALL}\n"}, MACHINE),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, MACHINE),
        ("0::/\n", {"memory.max": "max\n"}, MACHINE),
        ("0::/\n", {}, MACHINE),
        ("", {"memory.max": f"{SMALL}\n"}, MACHINE),
    ],
)
def test_the_limits_of_a_container_count(
    own: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    for name, content in files.items():
        file = tmp_path / "mounted" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    (tmp_path / "own").write_text(own)
    assert host_memory(tmp_path / "own", tmp_path / "mounted") == expected


def test_this_machine_has_some() -> None:
    assert GIB / 8 < host_memory() <= MACHINE
