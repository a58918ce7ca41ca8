"""One script per Python client, run by the Python of the client's own environment."""
