"""One replicate(): `replication` decides, `runner` carries it out."""
