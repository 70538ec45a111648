"""One node: the agent, the ranks that it forks, devices, ports, and the connection to the pilot."""
