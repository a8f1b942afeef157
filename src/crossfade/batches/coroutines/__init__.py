"""Batches as coroutines: where they stop, what each of them has of torch's state, and when their collectives ran."""
