"""A worker's way into the store: `client` is the public face, `session` decides, `connection` is its socket."""
