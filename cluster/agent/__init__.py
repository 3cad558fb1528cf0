"""Programs that run on a node.

local and ssh: check.sh (preflight), queue.sh (launch --wait), start.sh, node.sh, agent.pyz, poll.sh, stop.sh,
orphans.sh. common.sh has functions that they share, also with the scripts of other backends in cluster/backends/.

Variables of the agent, besides torchrun's `PET_*` and those that docs/reference/contract.md has for the trainer:

CLUSTER_NODE        name of the node; by default node-N
CLUSTER_NODE_ADDRESS
                    the address that the other nodes use; the node's script finds its network device
CLUSTER_HOSTS       in a batch job instead of the address: the hosts of all nodes
CLUSTER_FIRST_RANK  the node's first rank, if the nodes have different numbers of ranks (`--gpus 2,1`); not set:
                    PET_NODE_RANK times PET_NPROC_PER_NODE
CLUSTER_SECRETS     names of variables whose values the agent masks in every log, separated by commas
CLUSTER_STALL_TIMEOUT
                    seconds without progress after which the agent reports a stall; not set: never
CLUSTER_GRACE       seconds that ranks get after SIGTERM (`launch --grace`); not set: 120. `stop --grace` writes its
                    seconds to the file `grace`. A second stop can only shorten the first.
CLUSTER_RENDEZVOUS_TIMEOUT
                    seconds to wait until the master's name resolves; not set: start the ranks at once
CLUSTER_HOLD        seconds for which the container outlives its ranks, so that the launcher can copy files; not set: 0
CLUSTER_UMASK       umask of the ranks and of what the agent writes, in octal; not set: the container's
CLUSTER_SETUP, CLUSTER_SETUP_DIR, CLUSTER_IMAGE
                    the setup commands, the folder of their virtual environments, and the container image's name and ID,
                    each of which has another environment

Everything that a job starts has the name, the launch ID and the backend of the contract: processes from their first
moment in the environment, containers, networks and the objects of Kubernetes as labels, too. Containers also have the
label CLUSTER_UID, the number of the user who started them on that machine.

Files of a node in the folder of an attempt, `CLUSTER_RUN_DIR/attempt-N`:

NODE.json           the agent's status, replaced atomically
NODE.agent          the agent's process id and phase in one line, for shell scripts
NODE.log            the lines of all ranks; those of local rank 1 begin with `[1] `, the agent's with `agent: `
ranks/NODE/K.log    the lines of local rank K
NODE.exit           exit code and time, from the node's script outside of the container
NODE.err, NODE.pid  the runtime's error, and the process id of that script
NODE.venv           with setup commands: a link to the virtual environment
NODE.alive          a counter that the script increases; the agent exits if it does not change for 30 s
NODE.collected      an empty file that the launcher writes once it has copied the node's files (CLUSTER_HOLD)
grace               the seconds of `stop --grace`

An agent that sees the status file of a newer attempt kills its ranks at once: a machine that comes back after the
launcher has given it up must not write over the new attempt's checkpoints. Ranks that have been asked to end with a
checkpoint may finish it.

Fields of NODE.json:

phase               "starting", "setup", "running" or "exited"
heartbeat, pid      seconds since 1970, written every 2 s; the agent's process id
exit_code, ended_at, reason
                    at the end; `reason` is why the ranks were stopped
events              the last event of each of these kinds, by its name: setup, joining, ready, progress, metric, done.
                    An event of more than 16 KiB is only in the log. cluster/spec/status.py and app/node_agent/events.py
                    read these fields; a value that does not fit counts as missing.
usage               of the last heartbeat. `ranks`: rank, cpu (cores), rss (bytes, with child processes), and with a GPU
                    gpu, use (percent), memory and memory_total (bytes; null if unknown). `host`: free and total memory.
stall               one entry per rank while no rank of the node makes progress: rank, collective (a function of
                    torch.distributed, or ""), call (the newest function), place (`FILE:LINE` of the program), busy
                    (true if the ranks use the CPU or a GPU but stay at the same place)
leaving             the ranks that have not exited although the programs of all ranks of the node have ended with 0
output_at           when a rank wrote the last line of its log, by the clock of `heartbeat`; null before the first one
lost_lines, lost_why
                    how many lines of the logs could not be written completely (a full disk), and the last error
failure             the node's first failure: rank, time, exit_code, error and hint (one line each), secondary (true if
                    the rank only lost its peers), others (the failures of the other ranks). The error is the exception
                    that the rank recorded, else its exit code or signal; the control group's counter tells a SIGKILL by
                    the kernel's out-of-memory killer. Among nodes, a cause precedes a consequence; then the earlier
                    failure precedes the later one.

Exit codes of the agent: the code of the rank that failed first (128 + N for signal N); 75 if a rank exited with 75, or
after SIGUSR2; 71 if the node is unfit (port taken, no such program; from the node's script: no network device, a secret
without a value); 73 if the run directory cannot be written. After a failure the other ranks get no grace, because they
cannot write a checkpoint without the failed one.
"""
