"""The Adaptive Persistent Kernel (ExpertPlex section 4) on NVIDIA Hopper: build, buffers, launch, watch.

Owns everything between `csrc/apk/` and the MoE server's `cuda` backend. Knows nothing of vLLM or of servers.
"""
