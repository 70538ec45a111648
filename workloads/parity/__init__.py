"""Trains layouts of one model from the same seed and batches, and compares what they compute, tensor by tensor."""
