"""Real pilots and real submitters on a simulated cluster: an hour of random faults in a virtual hour, by a seed."""
