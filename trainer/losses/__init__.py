"""Loss functions, normalised over all ranks so that the number of ranks does not change the training."""
