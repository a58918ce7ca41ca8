"""Computes prompts and hands over the KV pages of target and draft, the first token and the draft's state.

The scheduler does not import torch: each turn it makes a plan (step_plan.py), and a worker (worker.py) applies it to
the device and sends pages as orders say (send_orders.py).
"""
