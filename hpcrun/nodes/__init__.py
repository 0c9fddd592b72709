"""The nodes of a job: their agents, lost nodes, spare nodes, and the nodes of each step."""
