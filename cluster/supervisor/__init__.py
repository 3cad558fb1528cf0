"""The life of a job: launch, rendezvous, following, restarts, report."""
