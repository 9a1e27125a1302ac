"""The bytes of one shard: where they lie, and which bytes go where."""
