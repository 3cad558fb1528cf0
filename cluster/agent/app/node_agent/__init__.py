"""The agent: runs the setup commands and the ranks of a node, masks secrets, finds failing and idle ranks.

    python3 agent.pyz [-m MODULE | --no-python PROGRAM | SCRIPT] ARGUMENTS...

The agent replaces torchrun: it reads torchrun's options from the same variables (`PET_*`) and sets the same variables
for each rank. torchrun itself maps every failure of a rank to exit code 1, terminates on SIGUSR2, and imports torch on
every node. docs/reference/contract.md has the variables, the files and the exit codes.

The agent needs Python 3.8 and the standard library, so any container image that can run PyTorch can run it.
"""
