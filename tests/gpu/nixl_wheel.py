"""Make a NIXL wheel small enough to copy to a GPU machine: a zip with only UCX, to be unpacked next to the sources.

pip download --no-deps --only-binary=:all: --python-version 3.12 --dest /tmp/wheels nixl-cu13
python -m tests.gpu.nixl_wheel /tmp/wheels/nixl_cu13-*.whl .whl/nixl.zip
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

UNUSED = (
    "nixl_ep_",
    ".data/",
    "libplugin_",
    "libtelemetry_exporter",
    "libaws",
    "libazure",
    "libucx_perftest",
    "libnixl_test",
    "libnixl_capi",
)


def main(wheel: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as trimmed:
        for name in whole.namelist():
            if name.endswith("libplugin_UCX.so") or not any(part in name for part in UNUSED):
                trimmed.writestr(name, whole.read(name))
    print(f"{target}: {target.stat().st_size >> 20} MiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
