"""Process group: the ranks of a training, their processes, and what they tell each other."""
