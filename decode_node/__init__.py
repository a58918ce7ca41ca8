"""KV pages, a first token and draft state in; tokens out, many requests per step.

The scheduler imports no torch: each turn it makes a plan (step_plan.py), and a worker (worker.py) applies it to the
device.
"""
