"""The HTTP server: its sockets, TLS, and the limits on connections."""
