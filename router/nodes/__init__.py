"""The nodes as the router sees them: membership, health and load, and the choice of a pair for a request."""
