"""The media types of bodies and answers."""

from __future__ import annotations

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"
