"""One thread for each test process: OpenMP's threads wait by spinning, and would take the core of the test beside."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read once, when torch is loaded
