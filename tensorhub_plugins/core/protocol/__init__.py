"""The messages between a client and the hub."""
