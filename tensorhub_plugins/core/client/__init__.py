"""A worker's interface to the store: `client` is the public face, `session` decides, `connection` is its socket."""
