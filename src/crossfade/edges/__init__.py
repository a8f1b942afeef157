"""Values whose tensors travel apart from their message."""
