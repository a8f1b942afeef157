"""What several actors do together: what fits and what comes out (`terms`, pure), their meeting (`table`), the group, and movers."""
