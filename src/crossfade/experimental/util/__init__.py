"""Ray's import paths of what collectives and type hints are given."""
