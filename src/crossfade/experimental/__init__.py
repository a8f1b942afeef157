"""Import paths of Ray's, for programs that are ported: what is here has its home elsewhere in crossfade."""
