"""Matrix products and their collectives as one operator, overlapped tile by tile (docs/decisions/0013)."""
