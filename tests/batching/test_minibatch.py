"""From groups to mini-batches: weights per update, filters, and a ledger that balances."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.batching.ledger import Ledger
from skyrl_jax.batching.minibatch import assemble, assemble_sft, sampled_tokens, split
from skyrl_jax.core.errors import DataError, LedgerError
from skyrl_jax.core.types import Status, TrajectoryGroup
from tests.batching.make import episode, group, objective, trajectory, turn

SHAPE = {"row_length": 16, "micro_rows": 2, "seed": 0}


def build(groups, updates=1, shape=SHAPE, **options):
    skip = {k: options.pop(k) for k in ("skip_zero", "total_rows") if k in options}
    return assemble(groups, objective(**options), updates=updates, **shape, **skip)


def ledger(groups, made) -> Ledger:
    sampled = sum(sampled_tokens(t) for g in groups for t in g.trajectories)
    return Ledger().sample(sampled).train(made.trained).drop_all(made.dropped)


def test_the_whole_way_by_hand() -> None:
    made = build([group([1, 0])])
    (batch,) = made.minibatches
    assert made.trained == 4 and sum(made.dropped.values()) == 0
    np.testing.assert_allclose(batch.loss_weights.sum(), 1.0)
    signed = (batch.loss_weights * batch.advantages).sum(axis=1)
    np.testing.assert_allclose(signed.sum(), 0.0, atol=1e-7)
    assert sorted(set(batch.advantages.ravel().tolist())) == [-0.5, 0.0, 0.5]
    on = batch.loss_weights > 0
    assert set(batch.tokens[on].tolist()) == {3, 4}, "trained tokens are the sampled ones"
    ledger([group([1, 0])], made).check_closed()


def test_advantages_are_broadcast_over_the_rows_of_a_rollout() -> None:
    """Faults C22: rollouts with 2, 1, 2, 1 rows and rewards 1, 0, 1, 0."""
    forked = (turn([1, 2], [3]), turn([1, 9], [4]))
    straight = (turn([1, 2], [3, 4]),)
    members = tuple(
        trajectory(r, *(forked if r else straight), index=i) for i, r in enumerate([1, 0, 1, 0])
    )
    groups = [TrajectoryGroup(task_id="t", trajectories=members)]
    made = build(groups, reduction="sequence_mean")
    (batch,) = made.minibatches
    assert sorted(set(batch.advantages.ravel().tolist())) == [-0.5, 0.0, 0.5]
    # two rows or one: the pull up equals the pull down
    signed = (batch.loss_weights * batch.advantages).astype(np.float64)
    assert signed[signed > 0].sum() == pytest.approx(-signed[signed < 0].sum())
    assert made.stats["forks"] == 2
    ledger(groups, made).check_closed()


def test_every_filter_is_in_the_ledger() -> None:
    long = turn(range(1, 16), [3, 4, 5])  # 18 tokens, rows of 16
    retry = (turn([1, 2], [8, 8]), turn([1, 2], [3]), turn([1, 2, 3, 4], [5]))
    members = (
        trajectory(1, turn([1, 2], [3, 4]), index=0),
        trajectory(0, long, index=1),
        trajectory(None, turn([1, 2], [3]), index=2),
        trajectory(0, turn([1], [2]), index=3, status=Status.TRUNCATED, reason="turns"),
        trajectory(0, *retry, index=4),
    )
    groups = [TrajectoryGroup(task_id="t", trajectories=members), group([0, 0], "u")]
    made = build(groups, masked_reasons=("turns",))
    assert made.trained == 2 + 2
    assert made.dropped == {"overlong": 3, "failed": 1, "filtered": 1 + 4, "abandoned": 2}
    ledger(groups, made).check_closed()
    (batch,) = made.minibatches
    # a masked rollout stays in the statistics: mean over 4 members, not 3
    assert batch.advantages.max() == 0.75
    assert made.stats["mixed_groups"] == 1 and made.stats["mixed_group_fraction"] == 0.5


def test_what_is_beside_the_work_is_in_the_ledger_and_in_no_statistics() -> None:
    title = dataclasses.replace(turn([9], [9, 9, 9]), kind="aux")
    retry = (turn([1, 2], [8]), turn([1, 2], [3]), turn([1, 2, 3, 4], [5]))
    members = (
        trajectory(1, title, *retry, index=0),
        trajectory(0, turn([1, 2], [3, 4]), index=1),
        trajectory(1, title, index=2),  # the agent said nothing: no member (faults C20)
    )
    groups = [TrajectoryGroup(task_id="t", trajectories=members)]
    made = build(groups)
    assert made.trained == 4 and made.dropped == {"aux": 6, "abandoned": 1}
    assert made.minibatches[0].advantages.max() == 0.5, "the mean is over two"
    ledger(groups, made).check_closed()
    kept = build(groups, abandoned="train")
    assert kept.trained == 5 and kept.dropped == {"aux": 6}
    ledger(groups, kept).check_closed()


def test_forks_are_in_the_metrics_by_cause() -> None:
    forked = (turn([1, 2], [3]), dataclasses.replace(turn([1, 9], [4]), fork="compaction"))
    members = (trajectory(1, *forked, index=0), trajectory(0, turn([1], [2]), index=1))
    made = build([TrajectoryGroup(task_id="t", trajectories=members)])
    assert made.stats["forks"] == made.stats["forks/compaction"] == 1


def test_samples_without_routing_are_refused_where_it_is_replayed() -> None:
    """Faults C15."""
    with pytest.raises(DataError, match="routed_experts"):
        assemble([group([1, 0])], objective(), updates=1, **SHAPE, routing=True)


def test_zeroed_reasons_make_a_solved_but_unsubmitted_group_mixed() -> None:
    cut = trajectory(1, turn([1, 2], [3, 4]), index=1, status=Status.TRUNCATED, reason="turns")
    done = trajectory(1, turn([1, 2], [3, 4]), index=0)
    groups = [TrajectoryGroup(task_id="t", trajectories=(done, cut))]
    assert build(groups).stats["mixed_groups"] == 0
    (batch,) = build(groups, zeroed_reasons=("turns",)).minibatches
    assert sorted(set(batch.advantages[batch.loss_weights > 0])) == [-0.5, 0.5]


def test_the_permuted_control_gets_no_signal_from_zeroed_reasons() -> None:
    """Zeroing comes before permuting: the other way round, to be cut would always be worth 0."""
    ending = {"status": Status.TRUNCATED, "reason": "turns"}
    members = [trajectory(1, turn([1, 2], [3, 4]), index=index) for index in range(4)]
    cut = trajectory(1, turn([1, 2], [7]), index=4, **ending)
    groups = [TrajectoryGroup(task_id="t", trajectories=(*members, cut))]
    signs = set()
    for seed in range(50):
        shape = SHAPE | {"seed": seed}
        made = build(groups, shape=shape, zeroed_reasons=("turns",), permute_rewards=True)
        (batch,) = made.minibatches
        signs |= set(np.sign(batch.advantages[(batch.tokens == 7) & (batch.loss_weights > 0)]))
    assert signs == {-1.0, 1.0}


def test_leaving_idle_rows_out_changes_no_weight_of_the_others() -> None:
    groups = [group([1, 0], "a"), group([1, 1], "b")]
    lean, full = build(groups), build(groups, skip_zero=False)
    assert lean.trained == 4 and full.trained == 8
    assert set(np.unique(lean.minibatches[0].loss_weights)) == {np.float32(0), np.float32(1 / 8)}
    total = [(b.loss_weights * b.advantages).sum() for b in lean.minibatches + full.minibatches]
    assert total[0] == total[1]
    for term in ("kl_coef", "entropy_coef", "balance_coef"):
        assert build(groups, **{term: 0.1}).trained == 8, f"{term} acts on rows of advantage 0 too"
    assert build([group([1, 1])]).minibatches == ()


def test_mini_batches_are_whole_reductions_and_train_each_token_once() -> None:
    groups = [group([1, 0, 1], f"task{i}") for i in range(5)]
    made = build(groups, updates=2)
    assert len(made.minibatches) == 2
    for batch in made.minibatches:
        assert batch.loss_weights.sum(dtype=np.float64) == pytest.approx(1.0)
    assert made.trained == 5 * 3 * 2
    ledger(groups, made).check_closed()


def test_the_permuted_control_keeps_everything_but_the_rewards() -> None:
    groups = [group([1] * 4, "a"), group([0] * 4, "b")]
    plain, control = build(groups), build(groups, permute_rewards=True)
    assert plain.minibatches == () and control.trained == 16
    ledger(groups, control).check_closed()


def test_assembling_is_deterministic_by_seed() -> None:
    groups = [group([1, 0], f"task{i}") for i in range(6)]

    def tokens(seed):
        made = build(groups, updates=3, shape={**SHAPE, "seed": seed})
        return [batch.advantages.tolist() for batch in made.minibatches]

    assert tokens(1) == tokens(1)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=30),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_split_deals_every_row_once_and_keeps_rollouts_together(pairs, parts, seed) -> None:
    keys = [(f"t{task}", f"t{task}/{sample}") for task, sample in pairs]
    dealt = split(keys, parts, seed)
    assert dealt == split(keys, parts, seed)
    assert sorted(row for part in dealt for row in part) == list(range(len(keys)))
    assert all(part for part in dealt) and len(dealt) <= parts
    for unit in (0, 1) if len({task for task, _ in keys}) >= parts else (1,):
        owners = {}
        for number, part in enumerate(dealt):
            for row in part:
                assert owners.setdefault(keys[row][unit], number) == number
    sizes = [len({keys[row][0] for row in part}) for part in dealt]
    if len({task for task, _ in keys}) >= parts:
        assert max(sizes) - min(sizes) <= 1


def test_split_depends_on_the_seed() -> None:
    keys = [(f"t{i}", f"t{i}/0") for i in range(8)]
    assert len({str(split(keys, 2, seed)) for seed in range(9)}) > 3


def test_a_token_lost_or_trained_twice_shows() -> None:
    groups = [group([1, 0])]
    made = build(groups)
    good = ledger(groups, made)
    with pytest.raises(LedgerError, match="off by -1: sampled 4 != trained 5"):
        good.train(1).check()
    with pytest.raises(LedgerError, match="off by 1"):
        good.sample(1).check()


def test_sft_batch() -> None:
    wrong_then_right = episode(
        turn([1, 2], [30, 31], [0.0, 0.0], version=-1),
        turn([1, 2, 30, 31, 5], [32, 33], [0.0, 0.0], version=-1),
        turn([1, 2, 30, 31, 5, 32, 33, 6], [34], [0.0], version=-1),
    )
    batch = assemble_sft(
        [wrong_then_right, episode(turn(range(1, 16), [3, 4]))],
        row_length=16, micro_rows=1, prompt_loss_weight=0.3, last_actions=2,
    )  # fmt: skip
    assert batch.tokens.shape == (1, 16), "a demonstration longer than a row is left out"
    total = 3 + 3 * 0.3
    weights = dict(
        zip(batch.tokens[0].tolist(), (batch.loss_weights[0] * total).tolist(), strict=True)
    )
    expected = {1: 0, 2: 0.3, 30: 0, 31: 0, 5: 0.3, 32: 1, 33: 1, 6: 0.3, 34: 1, 0: 0}
    assert weights == pytest.approx(expected, rel=1e-5)
    assert set(batch.advantages[0].tolist()) == {0.0, 1.0}
