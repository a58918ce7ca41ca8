"""Builds the kustomizations of deploy/kubernetes as kustomize does, for the features that they use and no others.

These are: resources (files and folders), components, namespace, images, replicas, configMapGenerator (files, behavior
replace, no suffix) and patches (strategic merge, with a target of kind and expression for names). Anything else is an
error.
"""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
KNOWN = {
    "apiVersion",
    "kind",
    "namespace",
    "resources",
    "components",
    "images",
    "replicas",
    "configMapGenerator",
    "generatorOptions",
    "patches",
}
# The keys by which strategic merge patches find elements of lists; other lists are replaced.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
SETS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "DisaggregatedSet")


def build(directory: Path) -> list[Manifest]:
    """Return the manifests of a kustomization. Raises ValueError for what this builder or kustomize does not know."""
    return _with_rest(directory, _read(directory), _resources(directory, _read(directory)))


def _read(directory: Path) -> Manifest:
    plan: Manifest = yaml.safe_load((directory / "kustomization.yaml").read_text())
    if unknown := plan.keys() - KNOWN:
        raise ValueError(f"{directory}: {unknown} is not built here")
    return plan


def _resources(directory: Path, plan: Manifest) -> list[Manifest]:
    found: list[Manifest] = []
    for name in plan.get("resources", []):
        path = (directory / name).resolve()
        found += build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    places = [place(each) for each in found]
    if twice := {each for each in places if places.count(each) > 1}:
        raise ValueError(f"{directory}: {twice} is there twice")
    return found


def _with_rest(directory: Path, plan: Manifest, manifests: list[Manifest]) -> list[Manifest]:
    for entry in plan.get("configMapGenerator", []):
        manifests = _with_config_map(directory, entry, manifests)
    for name in plan.get("components", []):
        component = (directory / name).resolve()
        parts = _read(component)
        manifests = _with_rest(component, parts, [*manifests, *_resources(component, parts)])
    for patch in plan.get("patches", []):
        manifests = _patched(directory, patch["target"], yaml.safe_load(patch["patch"]), manifests)
    for entry in plan.get("replicas", []):
        chosen = [
            each for each in manifests if each["metadata"]["name"] == entry["name"] and each["kind"] in SETS
        ]
        if not chosen:
            raise ValueError(f"{directory}: nothing called {entry['name']} has replicas")
        for each in chosen:
            each["spec"]["replicas"] = entry["count"]
    for image in plan.get("images", []):
        _rename(manifests, image["name"], f"{image['newName']}:{image['newTag']}")
    if "namespace" in plan:
        for each in manifests:
            each["metadata"]["namespace"] = plan["namespace"]
    return manifests


def _patched(
    directory: Path, target: Manifest, change: Manifest, manifests: list[Manifest]
) -> list[Manifest]:
    """Patch what has the target's kind, and a name that its expression matches as a whole; names stay as they are.

    kustomize ignores a patch without any target; here it is an error.
    """
    if change["kind"] != target["kind"] or change["metadata"].keys() != {"name"}:
        raise ValueError(f"{directory}: a patch for {target} is for something else, or changes metadata")
    chosen = [
        each
        for each in manifests
        if each["kind"] == target["kind"] and re.fullmatch(target["name"], each["metadata"]["name"])
    ]
    if not chosen:
        raise ValueError(f"{directory}: a patch for {target} has no target")
    body = {key: value for key, value in change.items() if key != "metadata"}
    return [merged(each, body) if each in chosen else each for each in manifests]


def place(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def merged(base: Any, patch: Any, key: str = "") -> Any:
    """Return a strategic merge: maps merge, null removes, lists of MERGE_KEYS merge by element, others are replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        result = deepcopy(base)
        for name, value in patch.items():
            if value is None:
                result.pop(name, None)
            else:
                result[name] = merged(result.get(name), value, name)
        return result
    by = MERGE_KEYS.get(key)
    if isinstance(base, list) and isinstance(patch, list) and by is not None:
        elements = deepcopy(base)
        for item in patch:
            at = next((index for index, each in enumerate(elements) if each[by] == item[by]), None)
            if at is None:
                elements.append(item)
            else:
                elements[at] = merged(elements[at], item)
        return elements
    return deepcopy(patch)


def _with_config_map(directory: Path, entry: Manifest, manifests: list[Manifest]) -> list[Manifest]:
    data = {Path(name).name: (directory / name).read_text() for name in entry["files"]}
    made = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": entry["name"]},
        "data": data,
    }
    others = [each for each in manifests if place(each) != place(made)]
    if (len(others) < len(manifests)) != (entry.get("behavior") == "replace"):
        raise ValueError(f"{directory}: ConfigMap {entry['name']} is created twice, or replaces nothing")
    return [*others, made]


def _rename(node: Any, name: str, image: str) -> None:
    if isinstance(node, dict):
        if node.get("image") == name:
            node["image"] = image
        for value in node.values():
            _rename(value, name, image)
    elif isinstance(node, list):
        for value in node:
            _rename(value, name, image)
