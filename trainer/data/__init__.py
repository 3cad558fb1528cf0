"""Data: the dataset protocol, how a dataset is opened and checked, and the folders of what follows."""
