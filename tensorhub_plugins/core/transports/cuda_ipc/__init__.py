"""The transport within one host for device memory: its readers open it and copy once."""
