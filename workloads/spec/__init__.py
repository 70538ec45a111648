"""The vocabulary: experiment, model, cluster, weights, and checks of what a user wrote."""
