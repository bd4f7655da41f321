"""Planner: which layout, parallelism, overlap and SM budget serve a load best.

Owns: descriptions of models, hardware, routing and load; the latency and memory models;
Algorithm 1 and its fast search. Must not know: running servers. Needs no GPU and no network.
"""
