"""`python -m cluster` is `clusterctl`."""

from cluster.cli.main import main

main()
