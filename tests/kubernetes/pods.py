"""Pods of built manifests on this machine, without a container engine.

Every pod has a mount namespace of its own, with volumes as kubelet makes them for fsGroup (root owns them, and the
group may write), and its containers run the commands and environments of the manifests as user 10001 without
capabilities. It needs root. The root directory is this machine's and writable, CPUs and memory have no limits, and pods
share the network: each has a loopback address instead of its own.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
USER = "10001"
VOLUMES = ("keys", "run", "cache")
END_SECONDS = 60


class Pods:
    """A context whose end kills what is left. `folder` has etc/, with all files of ConfigMaps, and secrets/."""

    def __init__(self, folder: Path, hosts: Mapping[str, str]) -> None:
        """`hosts`: name -> address, as the DNS of a cluster would answer."""
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in hosts.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        (folder / "python").mkdir()

    def __enter__(self) -> Pods:
        return self

    def __exit__(self, *error: object) -> None:
        for each in self._running.values():
            with contextlib.suppress(ProcessLookupError):  # also further containers of a pod that has ended
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()

    def start(self, pod: str, template: Mapping[str, Any], address: str) -> None:
        """Run the init container, then all containers; the pod ends with its first one."""
        for name in VOLUMES:
            volume = self.volume(pod, name)
            volume.mkdir(parents=True)
            os.chown(volume, 0, int(USER))
            volume.chmod(0o2777)
        spec = template["spec"]
        (init,) = spec["initContainers"]
        first, *others = (self._command(pod, address, each, each["args"]) for each in spec["containers"])
        names = [each["name"] for each in spec["containers"]]
        lines = [*self._mounts(pod), self._command(pod, address, init, init["command"])]
        lines += [
            f"{each} >{self.log(pod, name)} 2>&1 &" for each, name in zip(others, names[1:], strict=True)
        ]
        lines.append(f"exec {first} >{self.log(pod, names[0])} 2>&1")
        words = ["unshare", "--mount", "--propagation=private", "bash", "-ec", "\n".join(lines)]
        self._running[pod] = subprocess.Popen(words, cwd=ROOT, start_new_session=True)

    def volume(self, pod: str, name: str) -> Path:
        return self._folder / pod / name

    def log(self, pod: str, container: str) -> Path:
        return self._folder / f"{pod}.{container}.log"

    def drain(self) -> dict[str, int]:
        """Send SIGTERM to every pod and return the exit codes of the first containers."""
        for each in self._running.values():
            each.terminate()
        return {pod: each.wait(END_SECONDS) for pod, each in self._running.items()}

    def _mounts(self, pod: str) -> list[str]:
        """Return commands for its own view: of /run, of names, and of an interpreter in /root, which is closed."""
        python, seen = Path(sys.base_prefix), self._folder / "python"
        return [
            f"mount --bind {python} {seen}",
            "mount -t tmpfs -o mode=755 tmpfs /root",
            f"mkdir -p {python}",
            f"mount --bind {seen} {python}",
            f"mount --bind {self._folder}/hosts /etc/hosts",
            "mount -t tmpfs -o mode=755 tmpfs /run",
            "mkdir -p /run/tandem/keys /run/tandem/run",
            f"mount --bind {self.volume(pod, 'keys')} /run/tandem/keys",
            f"mount --bind {self.volume(pod, 'run')} /run/tandem/run",
            f"mount -t tmpfs -o mode=2777,gid={USER} tmpfs /dev/shm",
        ]

    def _command(self, pod: str, address: str, container: Mapping[str, Any], words: list[str]) -> str:
        fields = {"metadata.name": pod, "status.podIP": address}
        env = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.volume(pod, "cache")),
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TANDEM_PYTHON": sys.executable,
        }
        for each in container.get("env", []):
            source = each.get("valueFrom")
            env[each["name"]] = each["value"] if source is None else fields[source["fieldRef"]["fieldPath"]]
        command = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--bounding-set=-all"]
        command += ["--no-new-privs", "--", "env", "-i", *(f"{key}={value}" for key, value in env.items())]
        return shlex.join([*command, *(self._here(word, env) for word in words)])

    def _here(self, word: str, env: Mapping[str, str]) -> str:
        """Return a word with $(VARIABLE) replaced, and with the places of files on this machine."""
        for name, value in env.items():
            word = word.replace(f"$({name})", value)
        word = word.replace("/secrets/", f"{self._folder}/secrets/")
        for place in ("/etc/tandem-planner/", "/etc/tandem/"):
            word = word.replace(place, f"{self._folder}/etc/")
        return word
