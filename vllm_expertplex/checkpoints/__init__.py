"""Checkpoints made on this machine, for the demo and for tests: nothing comes from a model hub.

`demo` writes a small MoE model with real weights that answers in English; `tiny` writes checkpoints
with random weights of the architectures ExpertPlex is tested on. Nothing here knows about servers.
"""
