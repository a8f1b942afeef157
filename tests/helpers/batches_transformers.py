"""Models of Hugging Face's transformers, tiny and with random weights, sharded by its own tensor parallelism, as they come."""

from __future__ import annotations

import copy
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from crossfade import ops
from crossfade.batches import interleave
from tests.helpers.batches_models import gradients
from tests.helpers.batches_wrappers import GROUPS, quiet
from tests.helpers.ranks import needs

LIMIT = 2e-6
"""float32, and another order of summation."""
_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


def _sharded(config: Any) -> tuple[Any, Any]:
    """The model whole, and sharded over the ranks."""
    import transformers
    from transformers.distributed import DistributedConfig

    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    transformers.logging.set_verbosity_error()
    with quiet(), tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)  # rank 0 writes, all read
        torch.manual_seed(0)
        whole = transformers.AutoModelForCausalLM.from_config(config)
        whole.save_pretrained(folder[0])
        dist.barrier()
        parallel = DistributedConfig(tp_size=dist.get_world_size())
        sharded = transformers.AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=parallel)
        dist.barrier()
    assert any(isinstance(each, DTensor) for each in sharded.parameters()), "nothing is sharded"
    return whole, sharded


def _check(config: Any) -> None:
    whole, model = _sharded(config)
    tokens = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    handle = interleave(model, way=GROUPS)
    for checkpointed in (False, True):
        for each in (whole, model):
            each.train()
            if checkpointed:
                each.gradient_checkpointing_enable()
        with quiet():
            outputs = [
                _logits(call, module, tokens) for call, module in ((handle, model), (model, model), (whole, whole))
            ]
        for logits, found in outputs[1:]:
            _near(outputs[0][0], logits)
            for ours, theirs in zip(outputs[0][1], found, strict=True):
                _near(ours, theirs)
        counts = handle.report().counts
        assert sum(counts.stops) >= 4, handle.report()
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), quiet():
            _near(handle(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)


def _logits(call: Any, module: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    logits = call(tokens, use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach(), gradients(module)


def _near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    difference = float((ours - theirs).abs().max()) / max(1.0, float(theirs.abs().max()))
    assert difference < LIMIT, difference


@needs("transformers", "accelerate")
def llama(device: str) -> None:
    from transformers import LlamaConfig

    _check(LlamaConfig(**_SMALL))


@needs("transformers", "accelerate")
def mixtral(device: str) -> None:
    from transformers import MixtralConfig

    _check(MixtralConfig(**_SMALL, num_local_experts=4, num_experts_per_tok=2))


_PLAN = {
    "model.layers.*.self_attn.[qkv]_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


@needs("transformers")
def llama_by_parallelize(device: str) -> None:
    """Its linear layers are `crossfade.ops`, each with its collective."""
    import transformers

    torch.manual_seed(0)
    whole = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**_SMALL))
    model = ops.parallelize(copy.deepcopy(whole), _PLAN)
    tokens = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    handle = interleave(model, way=GROUPS)
    for _ in range(2):
        outputs = [_logits(call, each, tokens) for call, each in ((handle, model), (model, model))]
        _near(outputs[0][0], outputs[1][0])
        for ours, theirs in zip(outputs[0][1], outputs[1][1], strict=True):
            _near(ours, theirs)
    with torch.no_grad():
        _near(handle(tokens, use_cache=False).logits, whole(tokens, use_cache=False).logits)
    counts = handle.report().counts
    assert counts.stops == counts.collectives == (4, 4), handle.report()
