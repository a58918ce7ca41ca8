"""Sends finished requests as OpenTelemetry spans to a collector, if one is configured."""
