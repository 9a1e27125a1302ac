"""Who may do what: keys derived from one secret, and leases that a source checks by itself."""
