"""Programs that run in a job's containers: sent as text, standard library only, Python 3.8 or newer."""
