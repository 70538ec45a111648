"""Properties of a model's shape and a layout: parameters, FLOPs, partition, schedule."""
