"""What moves the tensors of a collective once its parties have agreed."""
