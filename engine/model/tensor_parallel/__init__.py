"""Tensor parallelism: a model's matrices cut over the tp axis of the mesh."""
