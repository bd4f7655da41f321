"""What runs inside vLLM's engine processes: executor, workers, the remote MoE layer, patches."""
