"""Worlds of the fake machine: rings, staged copies, ranks with lanes, operators, deaths; with places to plant faults in."""
