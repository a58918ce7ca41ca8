"""What HTTP may bind to without protection, and what each error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import Resolved, load_cluster
from common.config.admin_listener import admin_listeners
from common.config.http_exposure import is_loopback
from common.errors import ConfigError

TLS = "router.tls.cert=c.pem", "router.tls.key=k.pem"
OPEN = "router.host=0.0.0.0"
KEYS = "security.api_keys=keys.yaml"


def load(directory: Path, *overrides: str) -> Resolved:
    file = directory / "c.yaml"
    file.write_text(f"model: {{path: x}}\nprocess: {{run_dir: {directory}/run}}\n")
    return load_cluster(file, overrides, environ={})


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("box.example", False),
        ("", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((OPEN,), "deploy/api_key and set security.api_keys, or bind to 127.0.0.1; security.open_http: true"),
        (("router.host=box.example",), "box.example can be reached from other hosts"),
        ((OPEN, *TLS), "clients need no key"),
        ((OPEN, "security.plain_http=true"), "clients need no key"),
        ((OPEN, KEYS), "set router.tls.cert and router.tls.key; security.plain_http: true"),
    ],
)
def test_an_open_bind_is_refused(tmp_path: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(tmp_path, *overrides)
    assert caught.value.path == "router.host"


@pytest.mark.parametrize(
    "overrides",
    [
        (OPEN, KEYS, *TLS),
        (OPEN, KEYS, "security.plain_http=true"),
        (OPEN, *TLS, "router.tls.client_ca=ca.pem"),
        (OPEN, "security.open_http=true"),
        ("router.host=::1",),
    ],
)
def test_an_open_bind_that_is_protected_or_typed_out(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert load(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("override", "path"),
    [
        (TLS[0], "router.tls.key"),
        (TLS[1], "router.tls.cert"),
        ("router.tls.client_ca=ca.pem", "router.tls.client_ca"),
        ("router.allowed_hosts=[a.example, 'http://b']", "router.allowed_hosts[1]"),
        ("router.allowed_hosts=['a:80']", "router.allowed_hosts[0]"),
        ("router.cors_origins=['*']", "router.cors_origins[0]"),
        ("router.cors_origins=['https://a.example/']", "router.cors_origins[0]"),
        ("router.cors_origins=['null']", "router.cors_origins[0]"),
        ("router.cors_origins=['https://A.example']", "router.cors_origins[0]"),
        ("security.share_prefix_cache=true", "security.share_prefix_cache"),
        ("security.open_metrics=true", "security.open_metrics"),
    ],
)
def test_what_contradicts_itself_or_has_no_effect(tmp_path: Path, override: str, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, override)
    assert caught.value.path == path


def test_hosts_are_of_clusters_without_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.allowed_hosts: .* would have no effect"):
        load(tmp_path, KEYS, "router.allowed_hosts=[a]")


def test_the_admin_socket_is_in_the_run_directory(tmp_path: Path) -> None:
    found = admin_listeners(load(tmp_path))
    assert (found.socket, found.address) == (tmp_path / "run" / "router.admin.sock", None)
    found = admin_listeners(load(tmp_path, "router.admin=unix:a/b.sock"))
    assert (found.socket, found.address) == (tmp_path / "a/b.sock", None)
    found = admin_listeners(load(tmp_path, KEYS, "router.admin=http://[::1]:9000"))
    assert (found.socket, found.address) == (tmp_path / "run" / "router.admin.sock", ("::1", 9000))
    with pytest.raises(ConfigError, match=r"router\.admin.*shorter"):
        admin_listeners(load(tmp_path, "router.admin=unix:" + "a" * 120))


@pytest.mark.parametrize(
    ("admin", "words"),
    [
        ("http://127.0.0.1:9000", "--scope admin and set security.api_keys"),
        ("http://10.0.0.1:9000", "not a loopback address"),
        ("http://127.0.0.1", "is not a listener"),
        ("http://127.0.0.1:x", "is not a listener"),
        ("https://127.0.0.1:9000", "is not a listener"),
        ("http://127.0.0.1:9000/", "is not a listener"),
        ("unix:", "is not a listener"),
        ("yes", "is not a listener"),
    ],
)
def test_admin_listeners_that_are_refused(tmp_path: Path, admin: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(tmp_path, f"router.admin='{admin}'")
    assert caught.value.path == "router.admin"


def test_the_admin_port_is_another_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"port 8000 is router\.port"):
        load(tmp_path, KEYS, "router.admin=http://127.0.0.1:8000")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    resolved = load(tmp_path, OPEN, KEYS, *TLS, "router.tls.client_ca=/ca.pem")
    assert resolved.api_keys_path == tmp_path / "keys.yaml"
    assert resolved.tls_paths == (tmp_path / "c.pem", tmp_path / "k.pem", Path("/ca.pem"))
    assert load(tmp_path).tls_paths is load(tmp_path).api_keys_path is None
