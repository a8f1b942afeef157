"""Which way is the fastest: trying each, choosing one with all ranks, watching that choice, and saying why."""
