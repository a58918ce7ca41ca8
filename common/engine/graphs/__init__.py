"""Captures forward passes and replays them: the runner, its static inputs, the rules, and the program of each phase."""
