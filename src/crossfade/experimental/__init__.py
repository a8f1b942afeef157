"""The import paths of Ray's experimental names."""
