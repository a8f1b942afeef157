"""A product that signals its rows, tile by tile, as they are done: `matmul_signaled`, and the kernel behind it."""
