"""The small configurations of the learner's tests, in a test process or in a child of one."""

from skyrl_jax.core.config import LearnerConfig, ModelConfig, ObjectiveConfig

MODEL = ModelConfig(
    family="qwen3",
    vocab_size=40,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=24,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_embeddings=True,
    max_position=64,
    checkpoint="",
)
LEARNER = LearnerConfig(
    lr=1e-2,
    schedule="constant",
    warmup_steps=0,
    decay_steps=0,
    min_lr_fraction=0.1,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    moment_dtype="float32",
    max_grad_norm=0.0,
    compute_dtype="float32",
    row_length=24,
    micro_rows=2,
    updates_per_batch=1,
    epochs_per_batch=1,
    logprob_chunk=16,
    remat="none",
)
OBJECTIVE = ObjectiveConfig(
    advantage="grpo",
    normalize_std=True,
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=0.0,
    kl_coef=0.0,
    kl_kind="k3",
    entropy_coef=0.0,
    reduction="token_mean",
    reduction_norm=1.0,
    permute_rewards=False,
    masked_reasons=(),
    zeroed_reasons=(),
)
