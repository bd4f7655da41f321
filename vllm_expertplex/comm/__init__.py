"""One-sided transports: buffers, signals, dispatch and combine."""
