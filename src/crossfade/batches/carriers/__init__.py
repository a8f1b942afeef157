"""How the collectives of parts are started: by process groups, or by copy engines."""
