"""The bytes of one shard: where they lie, and which of them go where."""
