"""The peer "torch": Qwen3 of transformers with the usual GRPO step, in PyTorch on the CPU.

Attention is scaled_dot_product_attention, logits are made of the completion only, the optimizer is
the fused AdamW. bfloat16 means autocast over fp32 masters.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM
from turns import Prepared, serve


def prepare(job: Mapping[str, Any]) -> Prepared:
    """Make the model, the optimizer and the batch of a shape."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model = make_model(job)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    prompt, completion = job["prompt"], job["completion"]
    tokens = torch.randint(2, job["vocab"], (job["rows"], prompt + completion))
    targets = tokens[:, prompt:].reshape(-1)
    advantages = torch.randn(job["rows"], 1).expand(-1, completion).reshape(-1)
    half = job["dtype"] == "bfloat16"

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            # One position before the completion predicts its first token; the last predicts none.
            logits = model(input_ids=tokens, use_cache=False, logits_to_keep=completion + 1).logits
        logits = logits[:, :-1].flatten(0, 1).float()
        logprobs = -functional.cross_entropy(logits, targets, reduction="none")
        # The behaviour policy is uniform over the vocabulary.
        ratio = (logprobs + math.log(job["vocab"])).clamp(-20.0, 20.0).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = -gain.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    about = {
        "versions": {n: importlib.metadata.version(n) for n in ("torch", "transformers")},
        "params": sum(p.numel() for p in model.parameters()),
    }
    return Prepared(step=step, about=about)


def make_model(job: Mapping[str, Any]) -> Any:
    """Return a randomly initialised fp32 Qwen3 in training mode."""
    config = Qwen3Config(
        vocab_size=job["vocab"],
        hidden_size=job["dim"],
        num_hidden_layers=job["layers"],
        num_attention_heads=job["heads"],
        num_key_value_heads=job["kv_heads"],
        head_dim=job["head_dim"],
        intermediate_size=job["ffn"],
        max_position_embeddings=job["prompt"] + job["completion"],
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config).float().train()


if __name__ == "__main__":
    serve(prepare)
