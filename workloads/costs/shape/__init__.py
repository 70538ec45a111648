"""What follows from a model's shape and a layout alone: parameters, FLOPs, partition, schedule."""
