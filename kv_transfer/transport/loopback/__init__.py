"""One process: a real transport whose faults are scripted, for tests of everything above it."""
