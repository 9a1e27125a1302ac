"""What tcp, shm and rdma share: a stream of messages between a reader and a source."""
