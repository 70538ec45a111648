"""The vocabulary: experiment, model, cluster, weights, and checks of user input."""
