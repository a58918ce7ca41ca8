"""Receives KV pages, a first token and draft state from prefill nodes; decodes many requests per step.

The scheduler does not import torch: each turn it makes a plan (step_plan.py), and a worker (worker.py) applies it to
the device.
"""
