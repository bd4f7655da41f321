"""The MoE server: holds routed experts, computes operations, never starts communication."""
