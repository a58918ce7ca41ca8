"""Captures forward passes and replays them: the runner, its static inputs, the rules, the backends."""
