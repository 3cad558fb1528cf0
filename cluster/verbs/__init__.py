"""What `clusterctl` prints for each group of verbs: one file a group, only options and printing."""
