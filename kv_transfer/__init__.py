"""Moves pages, state and handoff records from prefill nodes to decode nodes; knows no model and no scheduler.

    prefill node: Sender  --page writes, then one record-->  memory of the decode node: Receiver
                          <------ control frames (bytes) ------>

`Sender` and `Receiver` are poll-driven and single-threaded: the node passes every frame of its peer socket to
`handle`, calls `poll` once per loop iteration and sends the frames that they produce. Input from a peer never makes
them raise. `transport/` has a folder for each way to write into the peer's memory: shm and cuda_ipc (same host, pools
on CPUs or on GPUs), tcp (any two hosts, CPUs), nixl (any two hosts, CPUs or GPUs), loopback (tests).
"""
