"""Computes prompts and hands over the KV pages of target and draft, the first token and the draft's state.

The scheduler does not import torch. In each turn it makes a plan (step_plan.py); a worker (worker.py) applies the plan
to the device and sends pages as the send orders say (send_orders.py).
"""
