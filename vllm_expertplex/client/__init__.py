"""The client of a deployment: one engine-core client in front of prefill and decode servers."""
