"""A routed feed-forward layer: each token runs through its k best of E experts; none is dropped.

    p = softmax(x W_router)                                          [N E], fp32
    C = the k largest of p, or the experts that the engine chose     [N k]
    w = p at C, divided by their sum where ``norm_topk_prob``
    y = sum_j w_j * down_Cj(silu(x gate_Cj) * (x up_Cj))

Tokens are sorted by expert, so each expert's part is one slice of a grouped matmul: the work does
not depend on how even the routing is, and there is no capacity that tokens could overflow. On CPU
``jax.lax.ragged_dot`` computes every expert for every token and masks, which is right and slow.
On a mesh the sort and the grouped matmuls run device by device (``_spread_experts``).

Shapes: N tokens, D model, E experts, F ffn of one expert, k experts per token, M = N k.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from skyrl_jax.core.config import ModelConfig
from skyrl_jax.models.grouped import grouped_matmul
from skyrl_jax.models.sharding import LOGICAL, mesh_axes

_MATRICES = ("expert_gate", "expert_up", "expert_down")
# Pieces into which the share of one device is cut where experts are spread: a device that got more
# than its share computes whole pieces, so at most 1/4 of a share too much.
PIECES = 4


class MoeStats(NamedTuple):
    """What a router did; padding is left out. Stacked over layers each leads with L.

    load [E]: f_e, the share of the N k assignments that went to expert e (sums to 1).
    prob [E]: p_e, the mean router probability of expert e (sums to 1).
    balance_loss: E sum_e f_e p_e: 1 when even, at most E. Its gradient flows through p alone.
        Source: Switch Transformer (arXiv 2101.03961), eq. 4 without alpha, 5 and 6. There k = 1;
        for k > 1 f counts assignments, not tokens, so that 1 stays the even value (transformers'
        ``load_balancing_loss_func`` is k times this).
    max_load: max_e f_e over the mean 1 / E: 1 when even, E / k or less (one expert cannot take
        a token twice).
    entropy: mean over tokens of -sum_e p log p, nats: log E when the router does not prefer any.
    dropped: assignments that no expert ran (an id outside 0..E-1), a count.
    chosen [N k]: the experts of each token, padding included.
    """

    load: Any
    prob: Any
    balance_loss: Any
    max_load: Any
    entropy: Any
    dropped: Any
    chosen: Any


def moe_mlp(
    cfg: ModelConfig,
    p: Any,
    x: Float[Array, "N D"],
    *,
    valid: Bool[Array, " N"] | None = None,
    experts: Int[Array, "N k"] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> tuple[Float[Array, "N D"], MoeStats]:
    """Run one layer's experts.

    Args:
        cfg: the model's shape.
        p: one layer's params: router [D E], expert_gate and expert_up [E D F], expert_down [E F D].
        x: normed residual stream.
        valid: tokens that count in the statistics; ``None`` = all.
        experts: replay: experts chosen elsewhere (by the engine that sampled) take the place of
            this router's own choice; their weights are still this router's. A row with an id
            outside 0..E-1 (-1: a token that the engine never fed) keeps its own choice.
        mesh: devices over which tokens and experts are spread, or ``None`` for one.
    """
    probs = router_probs(x, p["router"])
    chosen = jax.lax.top_k(probs, cfg.experts_per_token)[1]
    if experts is not None:
        known = (experts >= 0) & (experts < cfg.num_experts)
        chosen = jnp.where(jnp.all(known, axis=1, keepdims=True), experts, chosen)
    weights = jnp.take_along_axis(probs, chosen, axis=1)
    if cfg.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    if mesh is None:
        y = _weighted(p, x, chosen, weights, _kernel(None))
    else:
        y = _spread_experts(p, x, chosen, weights, mesh)
    return y.astype(x.dtype), router_stats(probs, chosen, valid)


def router_probs(x: Float[Array, "N D"], router: Float[Array, "D E"]) -> Float[Array, "N E"]:
    """Return each token's distribution over experts, fp32.

    Products are of the compute dtype, as in the engine; sums and softmax are fp32, for a logit
    rounded to bf16 would tie experts that are not equal.
    """
    logits = jnp.matmul(
        x, router.astype(x.dtype), precision=_precision(x), preferred_element_type=jnp.float32
    )
    return jax.nn.softmax(logits, axis=-1)


def router_stats(
    probs: Float[Array, "N E"], chosen: Int[Array, "N k"], valid: Bool[Array, " N"] | None = None
) -> MoeStats:
    """Return what the router did with the valid tokens (all zeros where there are none)."""
    n, num = probs.shape
    counted = jnp.ones((n,), jnp.float32) if valid is None else valid.astype(jnp.float32)
    total = jnp.maximum(jnp.sum(counted), 1.0)
    per_token = jnp.sum(jax.nn.one_hot(chosen, num, dtype=jnp.float32), axis=1)
    load = jnp.sum(per_token * counted[:, None], axis=0) / (total * chosen.shape[1])
    load = jax.lax.stop_gradient(load)
    prob = jnp.sum(probs * counted[:, None], axis=0) / total
    ours = jax.lax.stop_gradient(probs)
    surprise = jnp.sum(jnp.where(ours > 0, -ours * jnp.log(jnp.maximum(ours, 1e-30)), 0.0), axis=1)
    return MoeStats(
        load=load,
        prob=prob,
        balance_loss=num * jnp.sum(load * prob),
        max_load=num * jnp.max(load),
        entropy=jnp.sum(surprise * counted) / total,
        dropped=jnp.sum((chosen.shape[1] - jnp.sum(per_token, axis=1)) * counted),
        chosen=chosen,
    )


def _kernel(mesh: Mesh | AbstractMesh | None) -> str:
    """Return which kernel the devices have for grouped matmuls (models/grouped.py)."""
    known = isinstance(mesh, Mesh)
    platform = mesh.devices.flat[0].platform if known else jax.default_backend()
    return "tpu" if platform == "tpu" else ""


def _weighted(
    p: Any,
    x: Float[Array, "N D"],
    chosen: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    kernel: str,
) -> Float[Array, "N D"]:
    """Return the weighted sum of each token's experts, fp32."""
    outputs = _run_experts(p, x, chosen, kernel)
    return jnp.sum(weights[:, :, None] * outputs.astype(jnp.float32), axis=1)


def _run_experts(
    p: Any, x: Float[Array, "N D"], chosen: Int[Array, "N k"], kernel: str
) -> Float[Array, "N k D"]:
    """Return the output of each chosen expert for each token."""
    n, k = chosen.shape
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    out = _feed_forward(p, x[order // k], _sizes(flat, p["expert_gate"].shape[0]), kernel)
    # back from expert order to token order
    return out[jnp.argsort(order)].reshape(n, k, -1)


def _feed_forward(
    p: Any, rows: Float[Array, "M D"], sizes: Int[Array, " E"], kernel: str
) -> Float[Array, "M D"]:
    """Run rows that are sorted by expert: the first sizes[0] through expert 0, and so on."""
    gated = jax.nn.silu(grouped_matmul(rows, p["expert_gate"], sizes, kernel))
    gated = gated * grouped_matmul(rows, p["expert_up"], sizes, kernel)
    return grouped_matmul(gated, p["expert_down"], sizes, kernel)


def _sizes(flat: Int[Array, " M"], num: int) -> Int[Array, " E"]:
    """Return how many assignments each of the experts 0..num-1 has."""
    return jnp.sum(flat[:, None] == jnp.arange(num), axis=0, dtype=jnp.int32)


def _spread_experts(
    p: Any,
    x: Float[Array, "N D"],
    chosen: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    mesh: Mesh | AbstractMesh,
) -> Float[Array, "N D"]:
    """Return what ``_weighted`` returns, for tokens and experts that are spread over a mesh.

    Each device sorts and runs assignments by itself: sorted over all devices, every grouped matmul
    would first gather the tokens of all. Where the experts are spread over ``expert``, the devices
    of that axis share their tokens, each runs those assignments that fall to its own experts
    (``_own_part``), and the sums go back to the tokens' owners. ``tensor`` splits F, and sums.

    Cost per device and layer, with n = N / devices of the tokens and e = size of ``expert``:
    an all-gather of n (e - 1) rows of D in the compute dtype, a reduce-scatter of as many in fp32,
    and in the backward pass one of each again; the work is that of n k assignments where the
    experts are evenly loaded, and that of the busiest device where they are not. The matrices are
    gathered over ``fsdp`` in the compute dtype, as those of a dense layer are.
    """
    own = {name: mesh_axes(mesh, LOGICAL["layers"][name][1:], p[name].shape) for name in _MATRICES}
    (tokens,) = mesh_axes(mesh, ("flat",), x.shape[:1])
    if {a for a in mesh.shape if mesh.shape[a] > 1} - {"tensor", *tokens}:
        # Too few tokens to spread: the partitioner does what it can.
        return _weighted(p, x, chosen, weights, "")
    split, _, ffn = own["expert_gate"]
    varying, kernel = (*tokens, *ffn), _kernel(mesh)

    def local(x: Array, chosen: Array, weights: Array, *matrices: Array) -> Array:
        # Said here, once, that these differ between devices: said where they are first used (as
        # JAX would), their gradients were summed over the devices in every step of a loop.
        x, chosen, weights = (_vary(v, ffn) for v in (x, chosen, weights))
        ours = {
            name: _whole(w.astype(x.dtype), own[name], LOGICAL["layers"][name][1:], varying)
            for name, w in zip(_MATRICES, matrices, strict=True)
        }
        if not split:
            return _summed(_weighted(ours, x, chosen, weights, kernel), ffn)
        x, chosen, weights = (
            jax.lax.all_gather(v, "expert", axis=0, tiled=True) for v in (x, chosen, weights)
        )
        y = _own_part(ours, x, chosen, weights, varying, kernel, mesh.shape["expert"])
        return _summed(jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True), ffn)

    place = PartitionSpec(tokens or None)
    specs = [PartitionSpec(*(axes or None for axes in own[name])) for name in _MATRICES]
    spread = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(place, place, place, *specs),
        out_specs=place,
        check_vma=not kernel,  # Pallas calls do not say over which axes their results differ
    )
    return spread(x, chosen, weights, *(p[name] for name in _MATRICES))


def _whole(
    w: Array,
    own: tuple[tuple[str, ...], ...],
    logical: tuple[str, ...],
    varying: tuple[str, ...],
) -> Array:
    """Return this device's experts with their model axis whole; ``own`` = axes of each dimension.

    Its gradient is scattered over the axes that it was gathered over and summed over the others.
    """
    w = _vary(w, tuple(a for a in varying if not any(a in dim for dim in own)))
    at = logical.index("model")
    return jax.lax.all_gather(w, own[at], axis=at, tiled=True) if own[at] else w


def _own_part(
    p: Any,
    x: Float[Array, "N D"],
    chosen: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    varying: tuple[str, ...],
    kernel: str,
    devices: int,
) -> Float[Array, "N D"]:
    """Return what the experts of this device add to each token, fp32.

    Any number of the M assignments may be for them, from none to all. Sorted to the front they are
    run piece by piece until none is left: time and memory follow what came, and nothing is dropped.
    """
    (n, k), num = chosen.shape, p["expert_gate"].shape[0]
    size = n * k // (devices * math.gcd(PIECES, n * k // devices))
    flat = chosen.reshape(-1) - jax.lax.axis_index("expert") * num
    flat = jnp.where((flat >= 0) & (flat < num), flat, num)  # those of other devices come last
    order = jnp.argsort(flat, stable=True)
    scales = weights.reshape(-1)
    return _in_pieces(size, varying, kernel, p, x, scales, order, _sizes(flat, num))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _in_pieces(
    size: int,
    varying: tuple[str, ...],
    kernel: str,
    p: Any,
    x: Float[Array, "N D"],
    scales: Float[Array, " M"],
    order: Int[Array, " M"],
    sizes: Int[Array, " E"],
) -> Float[Array, "N D"]:
    """Run the first sum(sizes) assignments of ``order``, ``size`` at a time; fp32.

    With its own gradient: a loop of as many steps as there is work has none in JAX.

    Args:
        size: assignments of a piece.
        varying: mesh axes over which all values differ.
        kernel: of the grouped matmuls (models/grouped.py).
        p: this device's experts, whole but for F.
        x: tokens.
        scales: weight of each assignment; assignment j belongs to token j // k.
        order: assignments sorted by this device's experts, those of other devices last.
        sizes: assignments of each of this device's experts.
    """
    k = order.shape[0] // x.shape[0]

    def body(at: Array, y: Array) -> Array:
        index = jax.lax.dynamic_slice_in_dim(order, at, size)
        return y.at[index // k].add(run_piece(p, x[index // k], scales[index], at, sizes, kernel))

    return _loop(size, varying, sizes, body, _zeros(x, varying))


def _in_pieces_forward(
    size: int, varying: tuple[str, ...], kernel: str, *args: Any
) -> tuple[Array, Any]:
    return _in_pieces(size, varying, kernel, *args), args


def _in_pieces_backward(
    size: int, varying: tuple[str, ...], kernel: str, args: Any, ct: Array
) -> Any:
    """Run each piece again for its gradients; sums are fp32 until the last."""
    p, x, scales, order, sizes = args
    k = order.shape[0] // x.shape[0]

    def body(at: Array, sums: Any) -> Any:
        index = jax.lax.dynamic_slice_in_dim(order, at, size)

        def piece(p: Any, rows: Array, scales: Array) -> Array:
            return run_piece(p, rows, scales, at, sizes, kernel)

        _, pull = jax.vjp(piece, p, x[index // k], scales[index])
        new_p, rows, new_scales = pull(ct[index // k])
        of_p = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), sums[0], new_p)
        of_x = sums[1].at[index // k].add(rows.astype(jnp.float32))
        return of_p, of_x, sums[2].at[index].set(new_scales)

    start = jax.tree.map(lambda v: _zeros(v, varying), (p, x, scales))
    sums = _loop(size, varying, sizes, body, start)
    return *jax.tree.map(lambda a, v: a.astype(v.dtype), sums, (p, x, scales)), None, None


_in_pieces.defvjp(_in_pieces_forward, _in_pieces_backward)


def run_piece(p: Any, rows: Array, scales: Array, at: Array, sizes: Array, kernel: str) -> Array:
    """Return the weighted outputs [size, D] of the assignments from number ``at`` on, fp32."""
    size, num, ends = rows.shape[0], sizes.shape[0], jnp.cumsum(sizes)
    inside = jnp.clip(ends - at, 0, size) - jnp.clip(ends - sizes - at, 0, size)
    # What is left of the last piece runs through the last expert, and counts nothing.
    rest = jnp.where(jnp.arange(num) == num - 1, size - jnp.sum(inside), 0)
    out = _feed_forward(p, rows, inside + rest, kernel).astype(jnp.float32)
    ours = jnp.arange(size) < ends[-1] - at
    return scales[:, None] * jnp.where(ours[:, None], out, 0.0)


def _loop(size: int, varying: tuple[str, ...], sizes: Array, body: Any, start: Any) -> Any:
    """Return body(at, value) applied for at = 0, size, 2 size, ... below sum(sizes)."""
    total = jnp.sum(sizes)

    def step(state: tuple[Array, Any]) -> tuple[Array, Any]:
        at, value = state
        return at + size, body(at, value)

    first = _vary(jnp.zeros((), jnp.int32), varying)
    return jax.lax.while_loop(lambda state: state[0] < total, step, (first, start))[1]


def _zeros(like: Array, varying: tuple[str, ...]) -> Array:
    return _vary(jnp.zeros(like.shape, jnp.float32), varying)


def _vary(x: Array, axes: tuple[str, ...]) -> Array:
    return jax.lax.pcast(x, axes, to="varying") if axes else x


def _summed(x: Array, axes: tuple[str, ...]) -> Array:
    return jax.lax.psum(x, axes) if axes else x


def _precision(x: Array) -> Any:
    exact = x.dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
