"""Simulator: discrete events, iteration by iteration, on the planner's latency model.

Owns: arrivals, queues, batches, KV capacity and contention over time, for ExpertPlex and for the
serving modes it is compared with. Must not know: running servers. Every figure is simulated.
"""
