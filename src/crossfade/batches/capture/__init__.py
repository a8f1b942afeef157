"""Calls and steps as CUDA graphs: what can be captured, what a graph depends on, and the graphs of each way."""
