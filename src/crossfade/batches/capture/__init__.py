"""Calls and steps as CUDA graphs: what can be captured, what a graph goes on using, and the graphs of each way."""
