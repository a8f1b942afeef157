"""Movers: by copy engines, by a process group of torch.distributed, by a communicator of the user's."""
