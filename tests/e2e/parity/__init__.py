"""Are the answers those of plain vLLM? The same requests go to both, and everything is compared."""
