"""Between hosts by RDMA."""
