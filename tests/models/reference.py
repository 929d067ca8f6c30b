"""The decoder in plain numpy float64, token by token, written from the families' equations."""

import numpy as np


def frequencies(cfg):
    """Radians per position; scaling over wavelengths, as the Llama 3.1 release states it."""
    f = np.array([cfg.rope_theta ** (-2 * i / cfg.head_dim) for i in range(cfg.head_dim // 2)])
    if cfg.rope_factor == 1.0:
        return f
    longest = cfg.rope_original_position / cfg.rope_low_freq_factor
    shortest = cfg.rope_original_position / cfg.rope_high_freq_factor
    out = []
    for one in f:
        wavelength = 2 * np.pi / one
        if wavelength < shortest:
            out.append(one)
        elif wavelength > longest:
            out.append(one / cfg.rope_factor)
        else:
            span = cfg.rope_high_freq_factor - cfg.rope_low_freq_factor
            smooth = (cfg.rope_original_position / wavelength - cfg.rope_low_freq_factor) / span
            out.append((1 - smooth) * one / cfg.rope_factor + smooth * one)
    return np.array(out)


def rotate(x, frequency):
    """Rotate x [T, heads, K] at positions 0 .. T - 1."""
    half = len(frequency)
    out = np.empty_like(x)
    for position in range(len(x)):
        angle = position * frequency
        a, b = x[position, :, :half], x[position, :, half:]
        out[position, :, :half] = a * np.cos(angle) - b * np.sin(angle)
        out[position, :, half:] = b * np.cos(angle) + a * np.sin(angle)
    return out


def silu(x):
    return x / (1 + np.exp(-x))


def feed_forward(cfg, w, y):
    """Return the layer's feed-forward output of y [T, D]: every token on its own."""
    if not cfg.num_experts:
        return (silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]
    out = np.zeros_like(y)
    for t, token in enumerate(y):
        logits = token @ w["router"]
        p = np.exp(logits - logits.max())
        p /= p.sum()
        best = sorted(range(cfg.num_experts), key=lambda e: -p[e])[: cfg.experts_per_token]
        total = sum(p[e] for e in best) if cfg.norm_topk_prob else 1.0
        for e in best:
            gated = silu(token @ w["expert_gate"][e]) * (token @ w["expert_up"][e])
            out[t] += p[e] / total * (gated @ w["expert_down"][e])
    return out


def hidden(cfg, params, tokens):
    """Return the normed hidden states [T, D] of one sequence."""
    t, k = len(tokens), cfg.head_dim
    frequency = frequencies(cfg)

    def cast(node):
        if isinstance(node, dict):
            return {name: cast(value) for name, value in node.items()}
        return np.asarray(node, np.float64)

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.rms_norm_eps) * scale

    p = cast(params)
    x = p["embed"]["embedding"][np.asarray(tokens)]
    for n in range(cfg.num_layers):
        w = {name: leaf[n] for name, leaf in p["layers"].items()}
        y = norm(x, w["attn_norm"])
        q = (y @ w["q"] + w.get("q_bias", 0.0)).reshape(t, cfg.num_heads, k)
        key = (y @ w["k"] + w.get("k_bias", 0.0)).reshape(t, cfg.num_kv_heads, k)
        v = (y @ w["v"] + w.get("v_bias", 0.0)).reshape(t, cfg.num_kv_heads, k)
        if "q_norm" in w:
            q, key = norm(q, w["q_norm"]), norm(key, w["k_norm"])
        q, key = rotate(q, frequency), rotate(key, frequency)
        mixed = np.zeros((t, cfg.num_heads, k))
        for head in range(cfg.num_heads):
            kv = head // (cfg.num_heads // cfg.num_kv_heads)
            for i in range(t):
                s = q[i, head] @ key[: i + 1, kv].T / np.sqrt(k)
                weight = np.exp(s - s.max())
                mixed[i, head] = weight / weight.sum() @ v[: i + 1, kv]
        x = x + mixed.reshape(t, -1) @ w["o"]
        x = x + feed_forward(cfg, w, norm(x, w["mlp_norm"]))
    return norm(x, p["final_norm"]["scale"])
