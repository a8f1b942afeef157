"""What the user says, as data: nodes, the mistakes to be found in them, drawings. Knows nothing of how a graph runs."""
