"""Compiles the product kernel for Hopper, which needs no GPU, and looks at what came out: wide accesses, no spills, a release.

``python -m tests.helpers.tile_compile`` (Triton must not be told to interpret)
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crossfade.ops.signaled.kernels import product_kernel
from crossfade.ops.signaled.launch import ProductVariant
from crossfade.ops.signaled.tiles import TileConfig

HOPPER = GPUTarget("cuda", 90, 32)


class Compiled(NamedTuple):
    """What is looked at."""

    ptx: str
    shared_bytes: int
    num_spilled: int

    def count(self, what: str) -> int:
        return len(re.findall(what, self.ptx))


def product(config: TileConfig, *, is_b_transposed: bool) -> Compiled:
    variant = ProductVariant("bfloat16", is_b_transposed, 8, False, config)
    rows, columns, depth = config[:3]
    across = [columns, depth] if is_b_transposed else [depth, columns]
    kinds = {"a": f"tensordesc<bf16{[rows, depth]}>", "b": f"tensordesc<bf16{across}>"}
    return build(product_kernel, variant, kinds)


def build(kernel: Any, variant: ProductVariant, kinds: dict[str, str]) -> Compiled:
    constants = variant.constants()
    signature = {
        name: "constexpr" if name in constants else kinds.get(name) or parameter.annotation_type
        for name, parameter in zip(kernel.arg_names, kernel.params, strict=True)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs={})
    compiled = triton.compile(source, target=HOPPER, options=variant.options())
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [
            triton.knobs.nvidia.ptxas.path,
            "-v",
            "--gpu-name=sm_90a",
            str(path),
            "-o",
            str(path.with_suffix(".o")),
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr
    (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
    return Compiled(ptx, compiled.metadata.shared, int(spilled))


def check(compiled: Compiled, num_stores: int, what: str) -> None:
    """Tensor cores, loads by descriptor, stores of 16 bytes, all in registers."""
    assert compiled.count("wgmma.mma_async"), what
    assert compiled.count(r"cp\.async\.bulk\.tensor"), what
    assert compiled.count(r"st\.global\.v4") == num_stores, what
    assert not compiled.count(r"(st|ld)\.global\.b16"), what
    assert compiled.num_spilled == 0, what
    assert compiled.shared_bytes <= 227 << 10, what


def main() -> None:
    num_kernels = 0
    for config in (TileConfig(), TileConfig(num_stages=4), TileConfig(128, 128, 64, 8, 4)):
        num_stores = config.num_rows * config.num_columns // 8 // (32 * config.num_warps)
        for is_b_transposed in (False, True):
            counted = product(config, is_b_transposed=is_b_transposed)
            check(counted, num_stores, f"{config}")
            assert counted.count(r"atom\.global\.sys\.release\.add\.u32") == 1
            num_kernels += 1
    sys.stdout.write(f"{num_kernels} kernels\n")


if __name__ == "__main__":
    main()
