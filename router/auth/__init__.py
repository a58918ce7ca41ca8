"""Decides who may use a listener, and how much: API keys, scopes, quotas, and the origins of web pages."""
