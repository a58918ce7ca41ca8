"""Describes the HTTP API: an OpenAPI document made from the structs of requests and answers, and a page of it."""
