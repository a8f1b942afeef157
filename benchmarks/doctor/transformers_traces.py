"""Traces of Hugging Face's transformers: training steps, and decoding as a server does it. Needs GPUs and ``transformers``.

::

    python -m benchmarks.doctor.transformers_traces OUT                                                 # one GPU
    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.doctor.transformers_traces OUT     # also accelerate

Several ranks train by DDP and decode by transformers' own tensor parallelism.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the CPU only to try this file
_VOCABULARY = 8192
_NUM_TOKENS = 16  # that a request decodes in a step


def main() -> None:
    transformers: Any = importlib.import_module("transformers")
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    num_ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if _DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if num_ranks > 1:
        dist.init_process_group("nccl" if _DEVICE == "cuda" else "gloo")
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(_DEVICE, torch.bfloat16)
    suffix = f"-rank{rank}" if num_ranks > 1 else ""
    decoding = _sharded(transformers, model, num_ranks) if num_ranks > 1 else model
    training = nn.parallel.DistributedDataParallel(model) if num_ranks > 1 else model
    for name, step in (("training", _training(training)), ("decoding", _decoding(decoding))):
        for with_stack in (False, True):
            _record(step, out / f"hf-{name}{'-stacks' if with_stack else ''}{suffix}.json.gz", with_stack=with_stack)
    if num_ranks > 1:
        dist.destroy_process_group()


def _sharded(transformers: Any, model: Any, num_ranks: int) -> Any:
    """The same model, its layers split over the ranks."""
    distributed: Any = importlib.import_module("transformers.distributed")
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        if dist.get_rank() == 0:
            model.save_pretrained(folder[0])
        dist.barrier()
        sharded = transformers.AutoModelForCausalLM.from_pretrained(
            folder[0], dtype=torch.bfloat16, distributed_config=distributed.DistributedConfig(tp_size=num_ranks)
        )
        dist.barrier()
    return sharded


def _training(model: Any) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.randint(0, _VOCABULARY, (8, 512), device=_DEVICE)

    def train() -> None:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        float(loss)

    return train


def _decoding(model: Any) -> Callable[[], None]:
    """Eight requests, a token at a time; after each token the host looks whether all have ended."""
    prompt = torch.randint(0, _VOCABULARY, (8, 32), generator=torch.Generator().manual_seed(1)).to(_DEVICE)

    def decode() -> None:
        with torch.no_grad():
            past, token = None, prompt
            for _ in range(_NUM_TOKENS):
                found = model(input_ids=token, past_key_values=past, use_cache=True)
                past, token = found.past_key_values, found.logits[:, -1:].argmax(-1)
                if bool((token == -1).all()):
                    break

    return decode


def _record(step: Callable[[], None], path: Path, *, with_stack: bool) -> None:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (_DEVICE == "cuda")
    for _ in range(3):
        step()
    with profile(activities=activities, with_stack=with_stack, schedule=schedule(wait=1, warmup=1, active=3)) as prof:
        for _ in range(5):
            step()
            prof.step()
    prof.export_chrome_trace(str(path))


if __name__ == "__main__":
    main()
