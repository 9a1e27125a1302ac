"""Access control: keys derived from one secret, and leases that a source checks by itself."""
