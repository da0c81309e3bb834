"""Measurements on real sizes with random weights: each file is a command that prints one JSON object a line.

They need one or more GPUs and the workers' packages; docs/benchmarks.md says what they gave.
"""
