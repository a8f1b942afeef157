"""What the ranks of a group tell each other through its store: what they issue, and their answers to questions."""
