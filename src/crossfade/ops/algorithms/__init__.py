"""How the operators are done: the product and then torch.distributed, torch's fused operators, rounds by copy engines."""
