"""Names shared by `cluster` and `trainer` (docs/reference/contract.md), in two equal copies of this file."""

JOB_ID = "CLUSTER_JOB_ID"
ATTEMPT = "CLUSTER_ATTEMPT"
RUN_DIR = "CLUSTER_RUN_DIR"
NODES_ON_HOST = "CLUSTER_NODES_ON_HOST"
NODE = "CLUSTER_NODE"
NODE_ADDRESS = "CLUSTER_NODE_ADDRESS"
HOSTS = "CLUSTER_HOSTS"
SECRETS = "CLUSTER_SECRETS"
SETUP = "CLUSTER_SETUP"
SETUP_DIR = "CLUSTER_SETUP_DIR"
GLOBAL_WORLD_SIZE = "CLUSTER_WORLD_SIZE"

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
