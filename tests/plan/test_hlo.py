"""Collectives of a program's text, by hand."""

# ruff: noqa: E501 -- the texts are as the compiler prints them

import pytest

from skyrl_jax.plan.hlo import Collective, bytes_by_kind, read_collectives, shape_bytes

# Gathers [8, 4] in bf16 from four devices in a loop of 3, inside a loop whose end is a value; sums
# ten floats over two pairs in the outer loop; the names of other things mislead.
NESTED = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[2,4]{1,0})->f32[]}, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner_cond (p: (s32[], bf16[2,4])) -> pred[] {
  %p = (s32[]{:T(128)}, bf16[2,4]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %limit = s32[]{:T(128)} constant(3)
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%inner_body (p: (s32[], bf16[2,4])) -> (s32[], bf16[2,4]) {
  %p = (s32[]{:T(128)}, bf16[2,4]{1,0:T(8,128)(2,1)}) parameter(0)
  %x = bf16[2,4]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %kernel = bf16[2,4]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"=="},
 "xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(step)/while/body/splash"}
  %all-gather.5 = bf16[8,4]{1,0:T(8,128)(2,1)S(1)} all-gather(%x), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}, metadata={op_name="jit(step)/while/body/all-gather"}
  %all-reduce.9 = bf16[2,4]{1,0} slice(%all-gather.5), slice={[0:2], [0:4]}, metadata={op_name="all-reduce(x)"}
  ROOT %t = (s32[], bf16[2,4]{1,0}) tuple(%i, %all-reduce.9)
}

%outer_cond (p: (s32[], s32[], bf16[2,4])) -> pred[] {
  %p = (s32[], s32[], bf16[2,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %limit = s32[] get-tuple-element(%p), index=1
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%outer_body (p: (s32[], s32[], bf16[2,4])) -> (s32[], s32[], bf16[2,4]) {
  %p = (s32[], s32[], bf16[2,4]{1,0}) parameter(0)
  %q = (s32[], bf16[2,4]{1,0}) tuple(%zero, %x)
  %while.1 = (s32[], bf16[2,4]{1,0}) while(%q), condition=%inner_cond, body=%inner_body KNOWN
  %all-reduce.2 = f32[10]{0} all-reduce(%y), channel_id=2, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %t = (s32[], s32[], /*index=2*/bf16[2,4]{1,0}) tuple(%a, %b, %c)
}

ENTRY %main.7 (x: bf16[2,4]) -> f32[] {
  %x = bf16[2,4]{1,0} parameter(0)
  %while.2 = (s32[], s32[], /*index=2*/bf16[2,4]{1,0}) while(%init), condition=%outer_cond, body=%outer_body
  ROOT %all-reduce.3 = f32[] all-reduce(%z), channel_id=3, replica_groups={}, to_apply=%add
}
"""

KNOWN = ', backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}'


@pytest.mark.parametrize("known", ["", KNOWN])
def test_each_collective_counts_once_per_trip_of_every_loop_around_it(known):
    found = read_collectives(NESTED.replace(" KNOWN", known))
    assert found == [
        Collective(kind="all-gather", sent=48, loops=(None, 3)),  # 64 bytes, 3 of 4 parts come in
        Collective(kind="all-reduce", sent=40, loops=(None,)),  # 2 x 40 bytes x 1 / 2
        Collective(kind="all-reduce", sent=6, loops=()),  # 2 x 4 bytes x 3 / 4, all four devices
    ]
    assert [c.runs for c in found] == [3, 1, 1]
    assert bytes_by_kind(found) == {"all-gather": (3, 144), "all-reduce": (2, 46)}


def test_a_limit_that_is_fused_into_the_comparison_is_found():
    fused = NESTED.replace(
        "  %limit = s32[]{:T(128)} constant(3)\n  ROOT %less = pred[]{:T(512)} compare(%i, %limit), "
        "direction=LT",
        "  ROOT %less = pred[] fusion(%i), kind=kLoop, calls=%fused",
    )
    body = (
        "%fused (i: s32[]) -> pred[] {\n  %i = s32[] parameter(0)\n  %c = s32[] constant(7)\n"
        "  ROOT %less = pred[] compare(%i, %c), direction=LT\n}\n\n"
    )
    fused = fused.replace(" KNOWN", "").replace("%inner_cond (p", body + "%inner_cond (p", 1)
    assert [c.loops for c in read_collectives(fused)] == [(None, 7), (None,), ()]


def test_a_counter_that_starts_and_steps_otherwise():
    """A window over 16 parts: both ways at once, two steps a trip: 2, 5, 8, .. below 15."""
    text = """\
HloModule m, num_partitions=16

%cond (p: (f32[4], u32[])) -> pred[] {
  %p = (f32[4]{0}, u32[]) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=1
  %limit = u32[]{:T(128)} constant(15)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%body (p: (f32[4], u32[])) -> (f32[4], u32[]) {
  %p = (f32[4]{0}, u32[]) parameter(0)
  %x = f32[4]{0} get-tuple-element(%p), index=0
  %i = u32[]{:T(128)} get-tuple-element(%p), index=1
  %step = u32[]{:T(128)} constant(3)
  %next = u32[]{:T(128)} add(%i, %step)
  %collective-permute.1 = f32[4]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
  ROOT %out = (f32[4]{0}, u32[]) tuple(%collective-permute.1, %next)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %two = u32[]{:T(128)} constant(2)
  %first = u32[]{:T(128)} copy(%two)
  %in = (f32[4]{0}, u32[]) tuple(%x, %first)
  %loop = (f32[4]{0}, u32[]) while(%in), condition=%cond, body=%body
  ROOT %y = f32[4]{0} get-tuple-element(%loop), index=0
}
"""
    assert read_collectives(text) == [Collective(kind="collective-permute", sent=16, loops=(5,))]
    unseen = text.replace("tuple(%x, %first)", "tuple(%x, %other)").replace("add(%i", "max(%i")
    assert [c.loops for c in read_collectives(unseen)] == [(15,)]


GROUP = "replica_groups=[1,4]<=[4]"
PERMUTE = "source_target_pairs={{0,1},{1,0}}"


@pytest.mark.parametrize(
    ("instruction", "kind", "sent"),
    [
        # A quarter of the gathered 64 bytes is there already.
        (f"bf16[8,4]{{1,0}} all-gather(%x), {GROUP}", "all-gather", 48),
        # An operand, then the result.
        (f"(bf16[2,4]{{1,0}}, bf16[8,4]{{1,0}}) all-gather-start(%x), {GROUP}", "all-gather", 48),
        # Two at once: 64 + 16 bytes.
        (
            f"((bf16[2,4]{{1,0}}, f32[1]{{0}}), (bf16[8,4]{{1,0:T(8,128)}}, f32[4]{{0}})) "
            f"all-gather-start(%x, %y), {GROUP}",
            "all-gather",
            60,
        ),
        (f"f32[10]{{0}} all-reduce-start(%x), {GROUP}", "all-reduce", 60),
        (f"(f32[10]{{0}}, f32[2]{{0}}) all-reduce-start(%x, %y), {GROUP}", "all-reduce", 72),
        (
            f"(f32[10]{{0}}, f32[10]{{0}}, u32[]{{:S(2)}}) all-reduce-start(%x), {GROUP}",
            "all-reduce",
            60,
        ),
        # Three parts of 20 bytes leave for the other devices.
        (f"f32[5]{{0}} reduce-scatter(%x), {GROUP}, dimensions={{0}}", "reduce-scatter", 60),
        (
            f"(f32[5]{{0}}, f32[5]{{0}}, f32[5]{{0}}, f32[5]{{0}}) all-to-all(%a), {GROUP}",
            "all-to-all",
            60,
        ),
        (
            f"(bf16[6]{{0}}, bf16[6]{{0}}, u32[]{{:S(2)}}, u32[]{{:S(2)}}) "
            f"collective-permute-start(%x), {PERMUTE}",
            "collective-permute",
            12,
        ),
        # Groups written as lists, and as a permuted grid of two groups of four.
        ("f32[8]{0} all-gather(%x), replica_groups={{0,2},{1,3}}", "all-gather", 16),
        ("f32[8]{0} all-gather(%x), replica_groups=[2,4]<=[4,2]T(1,0)", "all-gather", 24),
        ("f32[8]{0} all-gather(%x), replica_groups={}", "all-gather", 28),  # all 8 devices
        # Groups by the axes of a mesh: one axis, two axes, half of an axis.
        ("f32[8]{0} all-gather(%x), replica_groups=mesh['a'=2,'b'=4] {'b'}", "all-gather", 24),
        ("f32[8]{0} all-gather(%x), replica_groups=mesh['a'=2,'b'=4] {'a','b'}", "all-gather", 28),
        ("f32[8]{0} all-gather(%x), replica_groups=mesh['a'=8] {'a':(4)2}", "all-gather", 16),
    ],
)
def test_bytes_that_one_device_sends(instruction, kind, sent):
    text = (
        "HloModule m, num_partitions=8\n\nENTRY %main (x: f32[1]) -> f32[] {\n"
        f"  %x = f32[1]{{0}} parameter(0)\n  %start = {instruction}\n"
        f"  ROOT %end = f32[8]{{0}} {kind}-done(%start)\n}}\n"
    )
    assert read_collectives(text) == [Collective(kind=kind, sent=sent, loops=())]


def test_what_is_fused_or_wrapped_counts_once():
    text = """\
HloModule m, num_partitions=4

%wrapped (x: f32[8]) -> f32[2] {
  %x = f32[8]{0} parameter(0)
  ROOT %reduce-scatter.1 = f32[2]{0} reduce-scatter(%x), replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add
}

%all-reduce-scatter.3 (x: f32[8]) -> f32[2] {
  %x = f32[8]{0} parameter(0)
  %all-reduce.4 = f32[8]{0} all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %slice = f32[2]{0} dynamic-slice(%all-reduce.4, %at), dynamic_slice_sizes={2}
}

ENTRY %main (x: f32[8]) -> f32[2] {
  %x = f32[8]{0} parameter(0)
  %start = ((f32[8]{0}), f32[2]{0}, u32[]{:S(2)}) async-start(%x), calls=%wrapped
  %done = f32[2]{0} async-done(%start), calls=%wrapped
  ROOT %fusion.1 = f32[2]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3
}
"""
    # Both send three parts of 8 bytes; the second is written as an all-reduce of 2 x 32 x 3 / 4.
    both = Collective(kind="reduce-scatter", sent=24, loops=())
    assert read_collectives(text) == [both, both]


def test_what_runs_in_pieces_beside_other_work_counts_where_it_starts():
    config = 'backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}'
    gather = f"all-gather(%x), channel_id=7, replica_groups=mesh['a'=4] {{'a'}}, dimensions={{0}}, {config}"
    text = f"""\
HloModule m, num_partitions=4

%begin (x: f32[2]) -> (f32[2], f32[8]) {{
  %x = f32[2]{{0}} parameter(0)
  %all-gather.1 = f32[8]{{0}} {gather}
  ROOT %custom-call.1 = (f32[2]{{0}}, f32[8]{{0}}, u32[]{{:S(2)}}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion.2 (x: f32[2]) -> f32[8] {{
  %x = f32[2]{{0}} parameter(0)
  ROOT %all-gather.2 = f32[8]{{0}} {gather}
}}

%end (x: f32[2]) -> f32[8] {{
  %x = f32[2]{{0}} parameter(0)
  %all-gather.3 = f32[8]{{0}} {gather}
  ROOT %custom-call.2 = f32[8]{{0}} custom-call(%x, %all-gather.3), custom_call_target="AsyncCollectiveDone"
}}

ENTRY %main (x: f32[2]) -> f32[8] {{
  %x = f32[2]{{0}} parameter(0)
  %fusion.1 = (f32[2]{{0}}, f32[8]{{0}}, u32[]{{:S(2)}}) fusion(%x), kind=kCustom, calls=%begin
  %fusion.2 = f32[8]{{0}} fusion(%x), kind=kOutput, calls=%async_collective_fusion.2
  ROOT %fusion.3 = f32[8]{{0}} fusion(%x), kind=kCustom, calls=%end
}}
"""
    assert read_collectives(text) == [Collective(kind="all-gather", sent=24, loops=())]


def test_shape_bytes():
    assert shape_bytes("(bf16[4,8]{1,0:T(8,128)}, f32[])") == 68
    assert shape_bytes("(pred[3]{0}, u8[2,2]{1,0}, s4[6]{0}, token[])") == 3 + 4 + 3
    assert shape_bytes("f8e4m3fn[5]{0}") == 5
    assert shape_bytes("f32[0,7]{1,0}") == 0


def test_a_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        read_collectives("HloModule empty\n")
