"""The engines that may run an experiment: ours, and others behind the same interface."""
