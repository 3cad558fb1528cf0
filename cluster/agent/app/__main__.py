"""Start of agent.pyz, and of this folder: `python3 cluster/agent/app` runs the agent, too."""

import sys

from node_agent.agent import main  # type: ignore[import-not-found]  # this folder is the first in sys.path

sys.exit(main(sys.argv[1:]))
