"""Job specifications as plain data: the job, its nodes, cluster.yaml. Pure."""
