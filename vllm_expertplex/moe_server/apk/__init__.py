"""The Adaptive Persistent Kernel (ExpertPlex section 4) on NVIDIA Hopper.

Owns: building, buffers, launching and watching the kernel of `csrc/apk/`.
Must not know: vLLM, servers, transports.
"""
