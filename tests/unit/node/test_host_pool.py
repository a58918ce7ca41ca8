"""The KV pool of a node on the CPU: one that does not fit in memory is refused before it is allocated."""

from __future__ import annotations

import pytest

from common.config.load import load_cluster
from common.config.resolve_node import node_plan
from common.errors import ConfigError
from common.node.serving_model import load_serving_model
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from tests.architecture.source_tree import ROOT


def test_a_pool_larger_than_the_machine_is_refused_by_its_key() -> None:
    overrides = ["decode.pool_tokens=1000000000000000"]
    resolved = load_cluster(ROOT / "deploy" / "clusters" / "local-plain.yaml", overrides, environ={})
    plan, log = node_plan(resolved.cluster, "decode", "decode-0", resolved.model_path), Log("test")
    with pytest.raises(
        ConfigError, match=r"decode\.pool_tokens: a KV pool of .* GiB is more than the .* tokens"
    ):
        load_serving_model(plan, StartupReporter(None, log), log)
