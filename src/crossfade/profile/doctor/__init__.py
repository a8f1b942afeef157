"""Why communication of a traced program is not hidden, what each fix wins, and a page that shows it."""
