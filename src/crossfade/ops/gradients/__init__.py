"""Gradients of the operators, for torch's autograd and for torch.compile."""
