"""A collector of OpenTelemetry that keeps the traces it gets over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

Batches = Queue[ExportTraceServiceRequest]


@contextmanager
def collector() -> Iterator[tuple[str, Batches]]:
    """Yield the address of a collector and the batches that it gets."""
    batches: Batches = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            traces = self.path == "/v1/traces"
            if traces:
                batches.put(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if traces else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", batches
        server.shutdown()
        thread.join()


def spans_in(batch: ExportTraceServiceRequest) -> list[Any]:
    """Return the spans of a batch, as protocol buffers."""
    return [span for group in batch.resource_spans for scope in group.scope_spans for span in scope.spans]
