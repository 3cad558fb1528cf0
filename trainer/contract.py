"""Names shared by `cluster` and `trainer` (docs/reference/contract.md), in two equal copies of this file."""

JOB_ID = "CLUSTER_JOB_ID"
LAUNCH_ID = "CLUSTER_LAUNCH_ID"
BACKEND = "CLUSTER_BACKEND"
USER_ID = "CLUSTER_UID"
ATTEMPT = "CLUSTER_ATTEMPT"
RUN_DIR = "CLUSTER_RUN_DIR"
CACHE_DIR = "CLUSTER_CACHE_DIR"
NODES_ON_HOST = "CLUSTER_NODES_ON_HOST"
NODE = "CLUSTER_NODE"
NODE_ADDRESS = "CLUSTER_NODE_ADDRESS"
HOSTS = "CLUSTER_HOSTS"
SECRETS = "CLUSTER_SECRETS"
STALL_TIMEOUT = "CLUSTER_STALL_TIMEOUT"
SETUP = "CLUSTER_SETUP"
SETUP_DIR = "CLUSTER_SETUP_DIR"
IMAGE = "CLUSTER_IMAGE"
GLOBAL_WORLD_SIZE = "CLUSTER_WORLD_SIZE"
FIRST_RANK = "CLUSTER_FIRST_RANK"
GRACE = "CLUSTER_GRACE"
RENDEZVOUS_TIMEOUT = "CLUSTER_RENDEZVOUS_TIMEOUT"
HOLD = "CLUSTER_HOLD"
UMASK = "CLUSTER_UMASK"

EVENT_MARK = "::cluster "

SETTING_UP = "setup"
JOINING = "joining"
READY = "ready"
PROGRESS = "progress"
METRIC = "metric"
CHECKPOINT = "checkpoint"
DONE = "done"
FAILED = "failed"
HEARTBEAT = "heartbeat"
STALLED = "stalled"

EXIT_BAD_INPUT = 2
EXIT_RUN_ME_AGAIN = 75

#: Seconds from SIGTERM to SIGKILL, in which ranks write a checkpoint, unless `--grace` gives others. The sender of the
#: SIGTERM counts them: `stop`, the container engine, or Slurm. What is inside waits longer, so that it never gives up
#: first, and its own limit matters only if the sender has died. From the outside to the inside:
#:   the launcher's stop scripts, `docker stop`, `docker compose down`, Slurm's time limit    the grace
#:   the agent, for its ranks                                                                GRACE_MARGIN_S more
#:   a program in a job that starts its own ranks (trainer/distributed/spawn.py)          no limit: the agent's
STOP_GRACE_S = 120.0
GRACE_MARGIN_S = 10.0
#: The longest grace: Slurm's --signal takes at most 65535 seconds.
MAX_GRACE_S = 65535.0
#: The file in an attempt's folder with the seconds of `stop --grace`, which replace the job's own.
GRACE_FILE = "grace"
#: The ending of the file NODE.collected in an attempt's folder: the launcher has copied the node's files.
COLLECTED_ENDING = ".collected"

#: The trainer's files in a run directory: its newest checkpoint, and the one before, for the case that it is damaged.
#: The launcher copies them to a job's new machines.
LAST_CHECKPOINT = "last.pt"
PREVIOUS_CHECKPOINT = "previous.pt"
#: The trainer's commands, of which the first one is the default.
COMMANDS = ("train", "val", "predict", "export", "info", "hyp", "verify", "profile", "data", "bench", "yolo")
#: The trainer's options whose value is a file or folder if it contains a '/': the launcher brings it to the nodes.
#: Those of `yolo` are written NAME=VALUE.
INPUT_OPTIONS = ("--data", "--cfg", "--hyp", "--weights", "data=", "model=", "cfg=", "pretrained=")
#: The built-in data sets of the trainer: after --data they win over a folder of the same name.
DATA_SETS = ("digits", "cifar10", "cifar100")
