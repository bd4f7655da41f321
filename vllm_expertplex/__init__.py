"""ExpertPlex: MoE serving for vLLM with experts held once and shared by both phases."""

__version__ = "0.1.0"
