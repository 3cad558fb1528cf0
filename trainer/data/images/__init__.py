"""Image files before training: their headers, what is odd about them, and their decoding as a check."""
