"""smg, SGLang's router, with the cluster as its worker."""

from __future__ import annotations

from tests.clients.features import URL, Features
from tests.clients.programs.command import MODEL_PATH
from tests.clients.programs.routers import add_features, free_port, running

if __name__ == "__main__":
    port = free_port()
    arguments = f"launch --worker-urls {URL} --host 127.0.0.1 --port {port} --prometheus-port {free_port()}"
    arguments += f" --policy round_robin --model-path {MODEL_PATH}"
    with running("smg", *arguments.split(), port=port) as url:
        features = Features()
        add_features(features, url)
        features.run()
