"""AsyncEP (MoE-Prefill): expert weights travel to the tokens, a layer ahead of their use."""
