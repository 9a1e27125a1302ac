"""The transport between hosts by RDMA."""
