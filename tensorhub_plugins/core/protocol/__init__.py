"""What a client and the hub say to each other."""
