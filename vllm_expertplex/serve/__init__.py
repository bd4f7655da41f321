"""The serve command: options, process tree, start-up, handshake, health, clean-up."""
