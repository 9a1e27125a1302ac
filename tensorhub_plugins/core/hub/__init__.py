"""The reference server: metadata only, never a weight byte. `hub` decides, `server` is its socket."""
