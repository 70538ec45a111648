"""One node: its agent, the ranks that the agent forks, devices, ports, and the connection to the pilot."""
