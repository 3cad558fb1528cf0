"""Source of agent.pyz, the archive of the agent that runs on every node (`cluster.agent.scripts.archive`)."""
