"""The decisions: from a checked graph to a plan, what it will cost, and when it will run. Pure code."""
