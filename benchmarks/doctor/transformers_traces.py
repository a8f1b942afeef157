"""Traces of Hugging Face's transformers: training steps, and decoding as a server does it. Needs a GPU and ``transformers``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule


def main() -> None:
    transformers: Any = importlib.import_module("transformers")
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    tokens = torch.randint(0, 8192, (8, 512), device="cuda")

    def train() -> None:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        float(loss)

    def decode() -> None:
        """Sixteen requests, a token at a time; finished ones are looked for after each."""
        prompt = tokens[:, :32]
        with torch.no_grad():
            past, token = None, prompt
            for _ in range(8):
                found = model(input_ids=token, past_key_values=past, use_cache=True)
                past, token = found.past_key_values, found.logits[:, -1:].argmax(-1)
                if bool((token == 0).all()):
                    break

    for name, step in (("training", train), ("decoding", decode)):
        for with_stack in (False, True):
            for _ in range(3):
                step()
            with profile(
                activities=activities, with_stack=with_stack, schedule=schedule(wait=1, warmup=1, active=3)
            ) as prof:
                for _ in range(5):
                    step()
                    prof.step()
            prof.export_chrome_trace(str(out / f"hf-{name}{'-stacks' if with_stack else ''}.json.gz"))


if __name__ == "__main__":
    main()
