"""Within one host: device memory, opened by its readers and copied once."""
