"""The devices: copies between them and the host, drivers, the graph gate, and kernels that run there."""
