"""The same model on both sides: ours in JAX, theirs in torch, float32 on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from skyrl_jax.models import decoder


def load_theirs(folder, **more):
    """Return transformers' model of an HF folder; every tensor must have found its place."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
        **more,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[kind], (kind, report[kind])
    return model.eval()


def our_logits(cfg, params, tokens, positions, segments):
    args = (jnp.asarray(x, jnp.int32) for x in (tokens, positions, segments))
    hidden = decoder.hidden_fn(cfg, params, *args)
    return jnp.matmul(hidden, decoder.head(cfg, params), precision="highest")


compiled_logits = jax.jit(our_logits, static_argnums=0)


def their_logits(model, tokens, positions):
    tokens, positions = (torch.from_numpy(np.array(x, np.int64)) for x in (tokens, positions))
    return model(input_ids=tokens, position_ids=positions, use_cache=False).logits
