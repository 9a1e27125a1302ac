"""The stream of messages between a reader and a source that tcp, shm and rdma share."""
