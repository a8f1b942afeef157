"""What the ranks of a torch.distributed group share: buffers and signals, and collectives over them that copy engines carry.

`group.open_group` makes a `PeerGroup` of a torch.distributed group; `collectives` has the functions that take its lanes and
tensors. The way from there down: `steps` cuts a collective into *exchanges* and kernels, `exchange` moves one block between every
two ranks, `lane` keeps the buffers and signals that exchanges need. All of that stands on `crossfade.device.driver`, so it runs on
GPUs (`cuda_home`), on CPU groups over shared memory (`host_home`), and on the fake machine, which proves the ordering.

Importing this room imports neither torch nor triton.
"""
