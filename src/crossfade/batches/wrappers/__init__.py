"""Modules in DDP, FSDP1 or FSDP2, and others whose batch must not be split."""
