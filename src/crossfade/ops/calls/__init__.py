"""One call of an operator: its shape, its operands, the job that an algorithm is given, and torch's collectives."""
