"""The manifests of deploy/kubernetes are valid, and agree with each other, with the cluster file and with the code."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import yaml

from common.config import Cluster, Resolved, load_cluster
from common.config.admin_listener import admin_listeners
from common.config.kv_events import event_addresses
from common.config.router_processes import router_hosts, router_process
from common.config.run_directory import peer_address
from common.config.schema import NodeEntry
from common.ipc.from_config import all_names
from common.ipc.key_files import public_file, secret_file
from common.node_names import is_pattern
from common.ready_file import ready_path
from deploy.planning.settings import read_settings
from tests.architecture.source_tree import ROOT
from tests.unit.manifests.kustomize import Manifest, build, merged, place

PLACE = ROOT / "deploy" / "kubernetes"
SCHEMAS = Path(__file__).parent / "schemas"
OVERLAYS = ("1p1d", "2p2d", "cpu", "movable", "leader-worker-set", "disaggregated-set")
CORE = "urn:core"
COMMANDS = (ROOT / "docs" / "kubernetes.md").read_text()
# Quantities of Kubernetes: a number, and a suffix of a power of 1000 or 1024.
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
UNITS = {"": Decimal(1), "m": Decimal("0.001"), "Mi": Decimal(2**20), "Gi": Decimal(2**30)}
# Made by the operator with the commands of docs/kubernetes.md, because they are secret or belong to the site.
MADE_BY_OPERATOR = {
    ("ConfigMap", "tandem-public-keys"),
    ("Secret", "tandem-router-key"),
    ("Secret", "tandem-prefill-key"),
    ("Secret", "tandem-decode-key"),
    ("Secret", "tandem-flex-keys"),
    ("Secret", "tandem-api-keys"),
    ("PersistentVolumeClaim", "tandem-models"),
}


@cache
def validator(definition: str) -> jsonschema_rs.Draft7Validator:
    custom = json.loads((SCHEMAS / "custom.json").read_text())["$defs"]
    core = json.loads((SCHEMAS / "core.json").read_text())["$defs"]
    both = json.loads(json.dumps({**core, **custom}).replace("core.json#/$defs/", "#/$defs/"))
    return jsonschema_rs.Draft7Validator({"$ref": "#/$defs/" + definition.replace("/", "~1"), "$defs": both})


def definition_of(manifest: Manifest) -> str:
    group, _, version = manifest["apiVersion"].rpartition("/")
    if (
        ("." in group and not group.endswith(".k8s.io"))
        or "x-k8s.io" in group
        or group.startswith("inference")
    ):
        return f"{group}/{version}/{manifest['kind']}"
    short = {"": "core", "networking.k8s.io": "networking", "rbac.authorization.k8s.io": "rbac"}
    name = short.get(group, group)
    return f"io.k8s.api.{name}.{version}.{manifest['kind']}"


def problems(manifest: Manifest) -> list[str]:
    return [
        f"{'/'.join(map(str, error.instance_path))}: {error.message}"
        for error in validator(definition_of(manifest)).iter_errors(manifest)
    ]


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> list[Manifest]:
    return build(PLACE / "overlays" / request.param)


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield (name of the set, pod template)."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            yield manifest["metadata"]["name"], spec["template"]
        elif manifest["kind"] == "LeaderWorkerSet":
            yield manifest["metadata"]["name"], spec["leaderWorkerTemplate"]["workerTemplate"]
        elif manifest["kind"] == "DisaggregatedSet":
            for role in spec["roles"]:
                yield role["name"], role["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def role_of(template: Manifest) -> str:
    role: str = template["metadata"]["labels"]["app.kubernetes.io/component"]
    return role


def main_container(template: Manifest) -> Manifest:
    (container,) = template["spec"]["containers"]
    found: Manifest = container
    return found


def all_containers(template: Manifest) -> list[Manifest]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def quantity(text: str) -> Decimal:
    found = QUANTITY.fullmatch(text)
    assert found is not None, f"{text} is not a quantity"
    suffix = found[2] or ""
    return Decimal(text.removesuffix(suffix)) * UNITS[suffix]


def cluster_of(manifests: list[Manifest], directory: Path, environ: dict[str, str] | None = None) -> Resolved:
    """Load the cluster file of a build as a pod does."""
    (config,) = [each for each in manifests if place(each) == ("ConfigMap", "tandem-cluster")]
    file = directory / "cluster.yaml"
    file.write_text(config["data"]["cluster.yaml"])
    return load_cluster(file, environ=environ or {})


# -- schemas -----------------------------------------------------------------------------------------------------


def test_every_manifest_fits_its_schema(overlay: list[Manifest]) -> None:
    assert {place(each): problems(each) for each in overlay if problems(each)} == {}


def with_components(directory: Path, overlay: str, *components: str) -> list[Manifest]:
    """Build an overlay to which components are added."""
    plan = {
        "resources": [str(PLACE / "overlays" / overlay)],
        "components": [str(PLACE / "components" / each) for each in components],
        "namespace": "tandem",
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(plan))
    built = build(directory)
    assert {place(each): problems(each) for each in built if problems(each)} == {}
    return built


@pytest.mark.parametrize("name", ["1p1d", "movable"])
def test_all_nodes_get_rdma_devices(name: str, tmp_path: Path) -> None:
    """And no capability, which a user other than root would not have in any case."""
    built = with_components(tmp_path, name, "rdma")
    for _, template in pod_templates(built):
        container = main_container(template)
        assert ("rdma/ib" in container["resources"]["limits"]) is (role_of(template) != "router")
        assert container["resources"]["limits"].get("rdma/ib") == container["resources"]["requests"].get(
            "rdma/ib"
        )
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_example_of_a_pool_has_the_routers() -> None:
    built = build(PLACE / "overlays" / "1p1d")
    (pool,) = yaml.safe_load_all((PLACE / "examples" / "inference-pool.yaml").read_text())
    assert problems(pool) == []
    routers = [each for name, each in pod_templates(built) if fits(pool["spec"]["selector"], each)]
    assert [role_of(each) for each in routers] == ["router"]
    (port,) = pool["spec"]["targetPorts"]
    assert port["number"] in [each["containerPort"] for each in main_container(routers[0])["ports"]]


@pytest.mark.parametrize("name", ["1p1d", "movable"])
def test_kv_events_reach_routers_and_nobody_else(name: str, tmp_path: Path) -> None:
    before = build(PLACE / "overlays" / name)
    built = with_components(tmp_path, name, "kv-events")
    variables = []
    for _, template in pod_templates(built):
        env = {each["name"]: each.get("value", "") for each in main_container(template)["env"]}
        variables.append({key: env[key] for key in env if "KV_EVENTS" in key or "PLACEMENT" in key})
    assert all(each == variables[0] for each in variables), "a router refuses nodes with other settings"
    cluster = cluster_of(built, tmp_path, variables[0]).cluster
    assert cluster.kv_events.enabled
    assert (cluster.router.placement.prefill, cluster.router.placement.decode) == ("cache_events",) * 2
    wanted = {
        int(address.rpartition(":")[2])
        for role in ("prefill", "decode")
        for entry in entries_of(cluster, role)
        for address in event_addresses(cluster, role, entry.name)
    }
    for to in {role_of(template) for _, template in pod_templates(built)} - {"router"}:
        opened = admitted(built, to, "router")
        assert opened is not None
        assert wanted <= opened
        for whence in ("prefill", "decode", None):
            assert admitted(built, to, whence) == admitted(before, to, whence)


def test_the_planner_may_scale_both_roles_and_nothing_else(tmp_path: Path) -> None:
    built = {place(each): each for each in with_components(tmp_path, "1p1d", "planner")}

    (rule,) = built["Role", "tandem-planner"]["rules"]
    assert (rule["apiGroups"], rule["resources"], rule["verbs"]) == (
        ["apps"],
        ["statefulsets/scale"],
        ["get", "patch"],
    )
    binding = built["RoleBinding", "tandem-planner"]
    assert binding["roleRef"]["name"] == "tandem-planner"
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "tandem-planner", "namespace": "tandem"}
    ]
    template = built["Deployment", "tandem-planner"]["spec"]["template"]
    assert template["spec"]["serviceAccountName"] == "tandem-planner"
    (container,) = template["spec"]["containers"]
    script, file, routers, *options = container["args"]
    assert options == ["--dry-run"], "it changes nothing until an operator has read its log"
    assert (ROOT / script).exists()
    settings_file = tmp_path / "planner.yaml"
    settings_file.write_text(built["ConfigMap", "tandem-planner"]["data"][Path(file).name])
    settings = read_settings(settings_file)
    assert settings.kubernetes is not None
    for role, section in (("prefill", settings.kubernetes.prefill), ("decode", settings.kubernetes.decode)):
        kind, name = section.split("/")[2:]
        assert f"{kind}/scale" in rule["resources"]
        assert name in rule["resourceNames"]
        assert ("StatefulSet", name) in built
        cluster = cluster_of(list(built.values()), tmp_path).cluster
        (entry,) = entries_of(cluster, role)
        most = settings.prefill.max if role == "prefill" else settings.decode.max
        assert entry.count is not None
        assert most <= entry.count
    assert routers == f"http://tandem-router:{cluster.router.port}"
    (variable,) = container["env"]
    assert variable["name"] == "OPENAI_API_KEY"
    assert f"secret generic {variable['valueFrom']['secretKeyRef']['name']} " in COMMANDS


def test_the_planner_of_roles_is_beside_the_only_router(tmp_path: Path) -> None:
    """It asks the admin socket in the router's run directory as the same user, and its end is not its container's."""
    built = {place(each): each for each in with_components(tmp_path, "movable", "planner-roles")}
    deployment = built["Deployment", "tandem-router"]["spec"]
    assert deployment["replicas"] == 1, "two planners would follow readings of their own"
    spec = deployment["template"]["spec"]
    router, planner = spec["containers"]
    assert (router["name"], planner["name"]) == ("router", "planner")
    assert planner["securityContext"] == router["securityContext"]
    places = {each["name"]: each["mountPath"] for each in planner["volumeMounts"]}
    assert places.items() - {("planner", "/etc/tandem-planner")} <= {
        (each["name"], each["mountPath"]) for each in router["volumeMounts"]
    }
    assert "keys" not in places
    assert {"name": "planner", "configMap": {"name": "tandem-planner-roles"}} in spec["volumes"]
    shell, option, command = planner["args"]
    assert (shell, option) == ("sh", "-c")
    found = re.fullmatch(r"while :; do (\S+) (\S+) (\S+) --dry-run; sleep [0-9]+; done", command)
    assert found is not None
    assert (ROOT / found[1]).exists()
    assert Path(found[2]).parent == Path(places["planner"])
    assert found[3] == f"{places['cluster']}/cluster.yaml"
    settings_file = tmp_path / "planner.yaml"
    settings_file.write_text(built["ConfigMap", "tandem-planner-roles"]["data"][Path(found[2]).name])
    settings = read_settings(settings_file)
    assert settings.kubernetes is None
    resolved = cluster_of(list(built.values()), tmp_path)
    listeners = admin_listeners(with_run_dir(resolved, tmp_path), to_write=False)
    assert listeners.socket.parent == tmp_path, "the admin socket is in the run directory, which both mount"
    counts = dict(replica_counts(list(built.values())))
    for role, limits in (("prefill", settings.prefill), ("decode", settings.decode)):
        assert limits.max == counts[role] + len(resolved.cluster.movable.nodes)


def with_run_dir(resolved: Resolved, run_dir: Path) -> Resolved:
    cluster = resolved.cluster
    process = msgspec.structs.replace(cluster.process, run_dir=str(run_dir))
    return dataclasses.replace(resolved, cluster=msgspec.structs.replace(cluster, process=process))


@pytest.mark.parametrize("name", ["1p1d", "movable"])
def test_nodes_may_read_endpoint_slices_and_nothing_else(name: str, tmp_path: Path) -> None:
    built = {place(each): each for each in with_components(tmp_path, name, "endpointslices")}
    assert built["Role", "tandem-node"]["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    binding = built["RoleBinding", "tandem-node"]
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": "tandem-node",
    }
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "tandem-node", "namespace": "tandem"}]
    for _, template in pod_templates(list(built.values())):
        is_router = role_of(template) == "router"
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is not is_router
        assert (spec["serviceAccountName"] == "tandem-node") is not is_router
        if not is_router:
            env = {each["name"]: each.get("value", "") for each in main_container(template)["env"]}
            address = env["TANDEM_ROUTER_CONTROL_ADDRESS"]
            environ = {"TANDEM_PROCESS_ADDRESS": "10.1.2.3", "TANDEM_ROUTER_CONTROL_ADDRESS": address}
            cluster = cluster_of(list(built.values()), tmp_path, environ).cluster
            assert router_hosts(cluster.router) == (address,)
            service, _, port = address.removeprefix("endpointslices://").rpartition(":")
            (control,) = built["Service", service]["spec"]["ports"]
            assert control["port"] == int(port)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"spec": {"template": {"spec": {"terminationGracePeriodSecond": 1}}}},
            "terminationGracePeriodSecond",
        ),
        ({"spec": {"replicas": "two"}}, "integer"),
        (
            {"spec": {"template": {"spec": {"containers": [{"name": "node", "imagePullPolici": "x"}]}}}},
            "imagePullPolici",
        ),
        ({"spec": {"template": {"spec": {"securityContext": {"runAsUser": "root"}}}}}, "integer"),
    ],
)
def test_the_schemas_find_mistakes(change: Manifest, words: str) -> None:
    (good,) = [
        each for each in build(PLACE / "overlays" / "1p1d") if place(each) == ("StatefulSet", "decode")
    ]
    assert problems(good) == []
    assert any(words in problem for problem in problems(merged(good, change)))


@pytest.mark.parametrize("path", ["rolloutStrategy", "leaderWorkerTemplate", "startupPolicy"])
def test_the_schemas_of_custom_kinds_find_mistakes(path: str) -> None:
    built = build(PLACE / "overlays" / "leader-worker-set")
    good = next(each for each in built if each["kind"] == "LeaderWorkerSet")
    spec = dict(good["spec"])
    spec[path + "s"] = spec.pop(path)
    assert any(f"{path}s" in problem for problem in problems({**good, "spec": spec}))


# -- what schemas do not see -------------------------------------------------------------------------------------


def fits(selector: Manifest, template: Manifest) -> bool:
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    labels = template["metadata"]["labels"]
    rules = selector.get("matchExpressions", [])
    assert all(rule["operator"] == "In" for rule in rules)
    return all(labels.get(key) == value for key, value in selector["matchLabels"].items()) and all(
        labels.get(rule["key"]) in rule["values"] for rule in rules
    )


def test_selectors_match_pods(overlay: list[Manifest]) -> None:
    templates = [template for _, template in pod_templates(overlay)]
    for manifest in overlay:
        spec = manifest.get("spec", {})
        if manifest["kind"] == "Service":
            chosen = [each for each in templates if fits({"matchLabels": spec["selector"]}, each)]
            assert len(chosen) == 1, place(manifest)
            names = {port["name"] for port in main_container(chosen[0])["ports"]}
            numbers = {port["containerPort"] for port in main_container(chosen[0])["ports"]}
            for port in spec["ports"]:
                assert port["targetPort"] in names | numbers, place(manifest)
        elif manifest["kind"] in ("PodDisruptionBudget", "Deployment", "StatefulSet"):
            chosen = [each for each in templates if fits(spec["selector"], each)]
            assert len(chosen) == 1, place(manifest)
            if "template" in spec:
                assert chosen == [spec["template"]]
        elif manifest["kind"] == "NetworkPolicy":
            assert any(fits(spec["podSelector"], each) for each in templates), place(manifest)
            for rule in spec.get("ingress", []):
                for peer in rule.get("from", []):
                    assert any(fits(peer["podSelector"], each) for each in templates), place(manifest)


def test_quantities_are_numbers_and_requests_fit_limits(overlay: list[Manifest]) -> None:
    for name, template in pod_templates(overlay):
        for container in all_containers(template):
            resources = container["resources"]
            requests, limits = resources["requests"], resources["limits"]
            assert "memory" in limits, name
            for key, text in requests.items():
                assert quantity(text) > 0, (name, key)
                assert key not in limits or quantity(text) <= quantity(limits[key]), (name, key)
            for key, text in limits.items():
                # Kubernetes wants extended resources alike in both.
                assert "/" not in key or requests.get(key) == text, (name, key)
        memory = quantity(main_container(template)["resources"]["limits"]["memory"])
        in_memory = [
            quantity(volume["emptyDir"]["sizeLimit"])
            for volume in template["spec"]["volumes"]
            if volume.get("emptyDir", {}).get("medium") == "Memory"
        ]
        assert name in ("prefill", "decode") or sum(in_memory) < memory, name


def test_everything_that_is_referenced_exists(overlay: list[Manifest]) -> None:
    there = {place(each) for each in overlay} | MADE_BY_OPERATOR
    commands = (ROOT / "docs" / "kubernetes.md").read_text()
    for kind, made in MADE_BY_OPERATOR:
        assert made in commands, f"docs/kubernetes.md does not say how {kind} {made} is made"
    for name, template in pod_templates(overlay):
        spec = template["spec"]
        assert ("ServiceAccount", spec["serviceAccountName"]) in there
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert len(volumes) == len(spec["volumes"])
        for container in all_containers(template):
            for mount in container["volumeMounts"]:
                assert mount["name"] in volumes, (name, mount)
        used = {
            mount["name"] for container in all_containers(template) for mount in container["volumeMounts"]
        }
        assert used == set(volumes), f"{name}: a volume that nothing mounts"
        for volume in volumes.values():
            kinds = volume.keys() - {"name"}
            assert len(kinds) == 1, volume
            sources = [volume, *volume.get("projected", {}).get("sources", [])]
            for source in sources:
                if "configMap" in source:
                    assert ("ConfigMap", source["configMap"]["name"]) in there
                if "secret" in source:
                    assert ("Secret", source["secret"]["name"]) in there
                if "persistentVolumeClaim" in source:
                    assert ("PersistentVolumeClaim", source["persistentVolumeClaim"]["claimName"]) in there
    for manifest in overlay:
        if manifest["kind"] == "StatefulSet":
            assert ("Service", manifest["spec"]["serviceName"]) in there


def test_ports_agree_with_the_cluster_file(overlay: list[Manifest], tmp_path: Path) -> None:
    cluster = cluster_of(overlay, tmp_path).cluster
    ports = {
        role_of(template): {port["name"]: port["containerPort"] for port in main_container(template)["ports"]}
        for _, template in pod_templates(overlay)
    }
    addresses = [each.removeprefix("dns://").rpartition(":") for each in router_hosts(cluster.router)]
    (control,) = {int(port) for _, _, port in addresses}
    (host,) = {name.rpartition(".")[2] for name, _, _ in addresses}
    (peers,) = {int(node.peer_address.rpartition(":")[2]) for node in cluster.prefill.nodes}
    (pages,) = {node.bulk_port for node in cluster.decode.nodes}
    both = {"movable": {"peers": peers, "pages": pages}} if cluster.movable.nodes else {}
    assert ports == {
        "router": {"http": cluster.router.port, "control": control},
        "prefill": {"peers": peers},
        "decode": {"pages": pages},
        **both,
    }
    services = {each["metadata"]["name"]: each["spec"] for each in overlay if each["kind"] == "Service"}
    assert services[host]["clusterIP"] == "None"
    assert services[host]["publishNotReadyAddresses"], (
        "a router becomes ready by nodes, which have to find it before"
    )
    assert [port["port"] for port in services[host]["ports"]] == [control]
    assert admitted(overlay, "router", None) == {cluster.router.port}
    for role in ports.keys() - {"router"}:
        assert admitted(overlay, "router", role) == {cluster.router.port, control}


def admitted(overlay: list[Manifest], to: str, whence: str | None) -> set[int] | None:
    """Return the ports of a role's pods that pods of another role reach; None: all; `whence` None: anybody.

    Policies that choose a pod add up, and one without a rule closes it.
    """
    templates = {role_of(template): template for _, template in pod_templates(overlay)}
    chosen = [
        each["spec"]
        for each in overlay
        if each["kind"] == "NetworkPolicy" and fits(each["spec"]["podSelector"], templates[to])
    ]
    assert chosen
    found: set[int] = set()
    for rule in [rule for policy in chosen for rule in policy.get("ingress", [])]:
        peers = rule.get("from")
        if peers is not None and (
            whence is None or not any(fits(peer["podSelector"], templates[whence]) for peer in peers)
        ):
            continue
        if "ports" not in rule:
            return None
        for port in rule["ports"]:
            found |= set(range(port["port"], port.get("endPort", port["port"]) + 1))
    return found


def test_nodes_reach_those_with_whom_they_exchange_pages_and_nobody_else_does(
    overlay: list[Manifest],
) -> None:
    """NIXL takes any port."""
    roles = {role_of(template) for _, template in pod_templates(overlay)}
    for to in roles - {"router"}:
        others = {"prefill": {"decode"}, "decode": {"prefill"}, "movable": {"prefill", "decode"}}[to]
        others |= roles & {"movable"}
        for whence in (*roles, None):
            assert admitted(overlay, to, whence) == (None if whence in others else set()), (to, whence)


def test_nodes_have_a_link_to_every_router(overlay: list[Manifest], tmp_path: Path) -> None:
    """Also to the one that an update adds; each router binds to an address that replaces the name in the file."""
    cluster = cluster_of(overlay, tmp_path).cluster
    assert router_hosts(cluster.router) == ("dns://tandem-router:5600",)
    (router,) = [each for each in overlay if place(each) == ("Deployment", "tandem-router")]
    update = router["spec"]["strategy"]["rollingUpdate"]
    assert router["spec"]["replicas"] + update["maxSurge"] <= cluster.router.found_routers
    assert update["maxUnavailable"] == 0
    (budget,) = [each for each in overlay if place(each) == ("PodDisruptionBudget", "tandem-router")]
    assert budget["spec"]["maxUnavailable"] == router["spec"]["replicas"] - 1
    (variable,) = main_container(router["spec"]["template"])["env"]
    own = cluster_of(overlay, tmp_path, {variable["name"]: variable["value"]})
    assert router_hosts(own.cluster.router) == ("tcp://0.0.0.0:5600",)
    assert router_process(own.cluster, 0).host_peers == ()


def test_pods_join_under_names_of_their_patterns(overlay: list[Manifest], tmp_path: Path) -> None:
    """Each node has an entry in the file, its address from the pod, and a count that its replicas do not exceed."""
    environ = {"TANDEM_PROCESS_ADDRESS": "10.1.2.3"}
    resolved = cluster_of(overlay, tmp_path, environ)
    replicas = {name: count for name, count in replica_counts(overlay)}
    for name, template in pod_templates(overlay):
        role = role_of(template)
        if role == "router":
            continue
        container = main_container(template)
        env = {each["name"]: each for each in container["env"]}
        assert env["TANDEM_PROCESS_ADDRESS"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        pod = "tandem-6d4cf56db6-prefill-0" if "POD_NAME" in env else f"{name}-0"
        node = env["NODE"].get("value", "$(POD_NAME)").replace("$(POD_NAME)", pod)
        assert container["args"] == [
            f"deploy/launch_{role}",
            "$(NODE)",
            "--cluster",
            "/etc/tandem/cluster.yaml",
        ]
        if role == "movable":
            listed = [each.name for each in resolved.cluster.movable.nodes]
            assert listed == [f"{name}-{number}" for number in range(replicas[name])]
        else:
            (entry,) = [each for each in entries_of(resolved.cluster, role) if is_pattern(each.name)]
            assert entry.count is not None
            assert replicas[name] <= entry.count
        if role != "decode":
            assert peer_address(resolved, node) == "tcp://10.1.2.3:5601"
        if role != "prefill":
            assert resolved.cluster.decode_node(node).host == "own"


def entries_of(cluster: Cluster, role: str) -> Sequence[NodeEntry]:
    return cluster.prefill.nodes if role == "prefill" else cluster.decode.nodes


def replica_counts(manifests: list[Manifest]) -> Iterator[tuple[str, int]]:
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet", "LeaderWorkerSet"):
            yield manifest["metadata"]["name"], manifest["spec"]["replicas"]
        elif manifest["kind"] == "DisaggregatedSet":
            for role in manifest["spec"]["roles"]:
                yield role["name"], role["spec"]["replicas"]


def test_each_set_has_a_budget_that_only_ready_pods_count_for(overlay: list[Manifest]) -> None:
    budgets = [each["spec"] for each in overlay if each["kind"] == "PodDisruptionBudget"]
    for _, template in pod_templates(overlay):
        (spec,) = [each for each in budgets if fits(each["selector"], template)]
        assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow", (
            "else a pod that hangs in its start holds up drains"
        )


def test_pods_of_a_role_are_spread_over_hosts() -> None:
    for _, template in pod_templates(build(PLACE / "overlays" / "2p2d")):
        (rule,) = template["spec"]["topologySpreadConstraints"]
        assert rule["topologyKey"] == "kubernetes.io/hostname"
        assert fits(rule["labelSelector"], template)
        assert rule["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == role_of(template)


def test_names_of_overlays_say_how_many_nodes_they_have() -> None:
    for name, expected in (("1p1d", (1, 1)), ("2p2d", (2, 2))):
        counts = dict(replica_counts(build(PLACE / "overlays" / name)))
        assert (counts["prefill"], counts["decode"]) == expected


def test_pods_end_only_after_the_longest_answer(overlay: list[Manifest], tmp_path: Path) -> None:
    cluster = cluster_of(overlay, tmp_path).cluster
    assert cluster.health.drain_timeout > cluster.router.request_timeout
    for name, template in pod_templates(overlay):
        hook = main_container(template).get("lifecycle", {}).get("preStop", {})
        pause = hook.get("sleep", {}).get("seconds", 0)
        assert (pause > 0) == (role_of(template) == "router"), "only clients come through a Service"
        grace = template["spec"]["terminationGracePeriodSeconds"]
        assert grace >= cluster.health.drain_timeout + pause + 10, name


def test_probes_mean_what_they_say(overlay: list[Manifest], tmp_path: Path) -> None:
    """Liveness never depends on other processes, so that the loss of nodes restarts no router."""
    resolved = cluster_of(overlay, tmp_path)
    for _, template in pod_templates(overlay):
        container = main_container(template)
        probes = {key: value for key, value in container.items() if key.endswith("Probe")}
        if role_of(template) == "router":
            paths = {key: probe["httpGet"]["path"] for key, probe in probes.items()}
            assert paths == {"startupProbe": "/live", "livenessProbe": "/live", "readinessProbe": "/ready"}
            assert {probe["httpGet"]["port"] for probe in probes.values()} == {"http"}
        else:
            ready = ready_path(Path(resolved.cluster.process.run_dir), "$NODE")
            assert probes.keys() == {"startupProbe", "readinessProbe"}
            assert resolved.cluster.health.hang_timeout > 0, "in place of a liveness probe"
            for probe in probes.values():
                assert probe["exec"]["command"] == ["sh", "-c", f"test -e {ready}"]
                assert probe["timeoutSeconds"] > 1, "a busy host takes longer to start a shell"
            # The volume, and so the file of a process that was killed, outlives a container.
            assert probes["startupProbe"]["initialDelaySeconds"] >= 10


def test_pods_have_no_rights_that_they_do_not_need(overlay: list[Manifest]) -> None:
    for name, template in pod_templates(overlay):
        spec = template["spec"]
        security = spec["securityContext"]
        assert security["runAsNonRoot"]
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, "a Service tandem-router would set TANDEM_ROUTER_PORT"
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for container in all_containers(template):
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"], name
            assert own["allowPrivilegeEscalation"] is False, name
            assert own["capabilities"] == {"drop": ["ALL"]}, name
        writable = {
            mount["mountPath"]
            for mount in main_container(template)["volumeMounts"]
            if not mount.get("readOnly")
        }
        assert {"/tmp", "/cache", "/run/tandem/run"} <= writable, name


def test_the_run_directory_is_made_by_the_process_itself(overlay: list[Manifest], tmp_path: Path) -> None:
    """The mount point of a volume belongs to root, and tandem refuses a run directory of another user."""
    run_dir = Path(cluster_of(overlay, tmp_path).cluster.process.run_dir)
    for name, template in pod_templates(overlay):
        mounts = main_container(template)["volumeMounts"]
        writable = {Path(mount["mountPath"]) for mount in mounts if not mount.get("readOnly")}
        assert run_dir.parent in writable, name
        assert run_dir not in writable, name


def test_each_pod_gets_the_keys_that_it_needs_and_no_others(overlay: list[Manifest], tmp_path: Path) -> None:
    resolved = cluster_of(overlay, tmp_path)
    keys = Path("/secrets")
    names = all_names(resolved.cluster)
    for _, template in pod_templates(overlay):
        role = role_of(template)
        own = {"router": "router", "movable": "$(NODE)"}.get(role, f"{role}-*")
        (init,) = template["spec"]["initContainers"]
        files = {Path(each) for each in init["command"] if each.startswith("/secrets/")}
        wanted = {public_file(keys, name) for name in names} | {secret_file(keys, own)}
        assert files == wanted | ({keys / "api_keys.yaml"} if role == "router" else set())
        assert init["command"][:2] == ["install", "--mode=0600"]
        target = init["command"][-1].removeprefix("--target-directory=")
        assert resolved.cluster.security.keys == target
        mounts = {each["name"]: each["mountPath"] for each in main_container(template)["volumeMounts"]}
        assert mounts["keys"] == target
        assert "secrets" not in mounts


def test_the_same_role_is_described_alike_in_all_overlays() -> None:
    """Sets differ; what a pod of a role does not: probes, keys, rights, end."""
    found: dict[str, list[Any]] = {}
    for name in OVERLAYS:
        for _, template in pod_templates(build(PLACE / "overlays" / name)):
            container = main_container(template)
            same = {
                key: value
                for key, value in container.items()
                if key not in ("resources", "env", "volumeMounts", "image")
            }
            # Which keys it copies depends on the names of the cluster file.
            init = [
                {key: value for key, value in each.items() if key != "command"}
                for each in template["spec"]["initContainers"]
            ]
            grace = template["spec"]["terminationGracePeriodSeconds"]
            found.setdefault(role_of(template), []).append((template["metadata"], same, init, grace))
    for role, versions in found.items():
        assert all(each == versions[0] for each in versions), role


def test_gpus_are_asked_for_where_the_cluster_file_has_them(overlay: list[Manifest], tmp_path: Path) -> None:
    cluster = cluster_of(overlay, tmp_path).cluster
    for name, template in pod_templates(overlay):
        role = role_of(template)
        if role == "router":
            assert "nvidia.com/gpu" not in main_container(template)["resources"]["limits"]
            continue
        (gpus,) = {
            0 if entry.device == "cpu" else entry.tensor_parallel
            for entry in entries_of(cluster, role)
            if entry.name.startswith(f"{name}-")
        }
        limits = main_container(template)["resources"]["limits"]
        assert int(limits.get("nvidia.com/gpu", 0)) == gpus
