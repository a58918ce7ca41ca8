"""The decode graphs: what a decode node captures and how a step is replayed."""
