"""What a trained model is used for: scores on a data set, boxes in pictures, files for other programs."""
