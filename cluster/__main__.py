"""`python -m cluster` is `clusterctl`."""

from cluster.cli import main

main()
