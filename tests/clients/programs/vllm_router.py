"""vllm-router, with the cluster as its worker."""

from __future__ import annotations

from tests.clients.features import URL, Features
from tests.clients.programs.routers import add_features, free_port, running

if __name__ == "__main__":
    port = free_port()
    arguments = f"--worker-urls {URL} --host 127.0.0.1 --port {port} --prometheus-port {free_port()}"
    with running("vllm-router", *arguments.split(), "--policy", "round_robin", port=port) as url:
        features = Features()
        add_features(features, url)
        features.run()
