"""Attention backward: bfloat16, head_dim 256, for Hopper.

Emitted by attngen 0.1. Stands alone (torch and triton only): read, edit and run it.
  spec    head_dim=256,dtype=bfloat16
  config  lowering=hopper,dq=kernel,block_m=64,num_stages=2,
          dv_first=false,dq_block_n=64,dq_k_stages=2,dq_v_stages=1
  again   attngen emit SPEC --direction bwd --config CONFIG, with SPEC and CONFIG as above
softmax_scale, softcap, dropout_p, window sizes, lengths and strides are arguments of launch().
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

HEAD_DIM = tl.constexpr(256)
HEAD_DIM_V = tl.constexpr(256)
DTYPE = tl.constexpr(tl.bfloat16)
LOG2E = tl.constexpr(1.4426950408889634)
PRECISION = tl.constexpr("ieee")  # of float32 products; 16-bit ones ignore it
ROWS = tl.constexpr(64)  # that one warpgroup multiplies
BLOCK_N = tl.constexpr(64)  # keys of a program of attn_bwd_dkdv
WIDTH = tl.constexpr(256)  # columns of q and k in shared memory
WIDTH_V = tl.constexpr(256)  # and of v and do
RUN_TIME = [  # sizes, strides, positions and windows: a new value compiles nothing
    "num_heads_q",
    "num_heads",
    "group_size",
    "heads_per_run",
    "seqlen_q",
    "seqlen_k",
    "padded_q",
    "q_start",
    "q_step",
    "k_start",
    "k_step",
    "align",
    "window_left",
    "window_right",
]

CONFIG_DKDV = {
    "BLOCK_M": 64,
    "NUM_STAGES": 2,
    "DO_STAGES": 2,
    "num_warps": 4,
    "maxnreg": 168,
}
CONFIG_DQ = {
    "BLOCK_N": 64,
    "K_STAGES": 2,
    "V_STAGES": 1,
    "num_warps": 4,
    "maxnreg": 168,
}


def barrier_ptx(what, threads):
    """The PTX of one named barrier; a kernel cannot put a string together itself."""
    return gl.constexpr(f"bar.{what} $1, {threads}; mov.b32 $0, 0;")


@gluon.jit
def named_barrier(number, PTX: gl.constexpr):
    """Arrive at a named barrier, or wait there too; Triton itself uses those below 6.

    The tensor has one element a thread, so that each thread runs the PTX once.
    """
    NUM_WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    numbers = gl.full([32 * NUM_WARPS], 0, gl.int32, LAYOUT) + number
    gl.inline_asm_elementwise(PTX, "=r,r", [numbers], gl.int32, is_pure=False, pack=1)


ARRIVE_288 = barrier_ptx("arrive", 288)  # both consumers and the producer
SYNC_288 = barrier_ptx("sync", 288)
ARRIVE_256 = barrier_ptx("arrive", 256)  # both consumers
SYNC_256 = barrier_ptx("sync", 256)
# Numbers of barriers; of a ring, of its first slot.
P_READY = tl.constexpr(6)
P_READ = tl.constexpr(7)
SLOT = tl.constexpr(8)
DO_SLOT = tl.constexpr(12)
K_SLOT = tl.constexpr(8)
V_SLOT = tl.constexpr(12)


@gluon.jit
def tiles_of(descriptor, COUNT: gl.constexpr):
    """Shared memory for some tiles of a descriptor."""
    ROWS_OF_TILE: gl.constexpr = descriptor.block_shape[2]
    COLUMNS: gl.constexpr = descriptor.block_shape[3]
    return gl.allocate_shared_memory(
        descriptor.dtype, [COUNT, 1, 1, ROWS_OF_TILE, COLUMNS], descriptor.layout
    )


@gluon.jit
def opaque(number):
    """The same number, which the compiler cannot tell: what depends on it is not computed before
    the loop, where it would take registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(number)], gl.int32, False, 1
    )


@triton.jit
def locate(pid, num_tiles, num_heads, heads_per_run):
    """(tile, head) of a program: heads in runs whose K and V fit in L2, tile by tile in a run."""
    first = pid // (num_tiles * heads_per_run) * heads_per_run
    heads = tl.minimum(heads_per_run, num_heads - first)
    rest = pid - first * num_tiles
    return rest // heads, first + rest % heads


@triton.jit
def load_rows(
    head_ptr,
    stride,
    start,
    limit,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    GUARD: tl.constexpr,
):
    """Rows start .. start + COUNT and columns FIRST .. FIRST + WIDTH of one head.

    Rows from `limit` on (if GUARD) and columns from DIM on read as zero.
    """
    rows = tl.arange(0, COUNT)
    columns = FIRST + tl.arange(0, WIDTH)
    stride = tl.cast(stride, tl.int64)
    ptrs = head_ptr + start * stride + (rows[:, None] * stride + columns[None, :])
    if GUARD and FIRST + WIDTH > DIM:
        return tl.load(ptrs, (start + rows < limit)[:, None] & (columns < DIM)[None, :], 0.0)
    elif GUARD:
        return tl.load(ptrs, (start + rows < limit)[:, None], 0.0)
    elif FIRST + WIDTH > DIM:
        return tl.load(ptrs, (columns < DIM)[None, :], 0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def store_rows(
    head_ptr,
    stride,
    start,
    limit,
    value,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
):
    """Write a [COUNT, WIDTH] tile to rows start .. below `limit`, columns FIRST .. below DIM."""
    rows = tl.arange(0, COUNT)
    columns = FIRST + tl.arange(0, WIDTH)
    stride = tl.cast(stride, tl.int64)
    ptrs = head_ptr + start * stride + (rows[:, None] * stride + columns[None, :])
    inside = (start + rows < limit)[:, None] & (columns < DIM)[None, :]
    tl.store(ptrs, value.to(head_ptr.dtype.element_ty), inside)


@triton.jit
def score(qk, qk_scale):
    """The raw q.k: its scale is applied inside the exponential."""
    return qk


@triton.jit
def probability(s, exp_scale, minus_lse):
    """P from a score and minus the row's log-sum-exp in base 2, -inf where there is no gradient.

    The fused product keeps what scores of 1e5 and more differ by.
    """
    return tl.exp2(tl.fma(s, exp_scale, minus_lse))


@triton.jit(do_not_specialize=RUN_TIME)
def attn_bwd_preprocess(
    out_ptr,
    stride_ob,
    stride_oh,
    stride_os,
    do_ptr,
    stride_gb,
    stride_gh,
    stride_gs,
    dlse_ptr,
    lse_ptr,
    rows_ptr,
    num_heads_q,
    seqlen_q,
    padded_q,
    BLOCK_M: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """Two numbers a query row: minus lse in base 2, and delta = rowsum(out * do) - dlse
    (FlashAttention-2, algorithm 2).

    Rows past the end, rows that see no key, and rows whose lse is too large for float32 to tell
    their P (their scores exceed 4e7) get lse = inf, and so P = 0 and no gradient.
    """
    num_tiles = tl.cdiv(padded_q, BLOCK_M)
    start_m = tl.program_id(0) % num_tiles * BLOCK_M
    head = tl.program_id(0) // num_tiles
    batch = head // num_heads_q
    head_q = head % num_heads_q
    rows = start_m + tl.arange(0, BLOCK_M)
    inside = rows < seqlen_q
    o_head = out_ptr + batch * tl.cast(stride_ob, tl.int64)
    o_head += head_q * tl.cast(stride_oh, tl.int64)
    do_head = do_ptr + batch * tl.cast(stride_gb, tl.int64)
    do_head += head_q * tl.cast(stride_gh, tl.int64)
    delta = tl.zeros([BLOCK_M], tl.float32)
    o = load_rows(
        o_head,
        stride_os,
        start_m,
        seqlen_q,
        0,
        BLOCK_M,
        256,
        HEAD_DIM_V,
        True,
    )
    do = load_rows(
        do_head,
        stride_gs,
        start_m,
        seqlen_q,
        0,
        BLOCK_M,
        256,
        HEAD_DIM_V,
        True,
    )
    delta += tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    at = head.to(tl.int64) * seqlen_q + rows
    lse = tl.load(lse_ptr + at, inside, float("-inf")) * LOG2E
    lost = tl.abs(lse) > 67108864.0
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + at, inside, 0.0)
    to = head.to(tl.int64) * 2 * padded_q + rows
    tl.store(rows_ptr + to, tl.where(lost, float("-inf"), -lse))
    tl.store(rows_ptr + to + padded_q, tl.where(lost, 0.0, delta))


@gluon.jit
def hide_from(x, end):
    """x with zeros from column `end` of each row on."""
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    return gl.where(columns[None, :] < end[:, None], x, 0.0)


@gluon.jit
def produce_bwd(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    rows_desc,
    q_ring,
    k_tiles,
    v_tiles,
    do_ring,
    lse_ring,
    delta_ring,
    kv_full,
    q_full,
    do_full,
    batch,
    head_q,
    head_kv,
    num_heads_q,
    padded_q,
    start_n,
    begin,
    end,
    num_steps,
    BLOCK_M: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    DO_STAGES: gl.constexpr,
):
    """The producer warp: K and V once, then the query tiles of one head after the other, q and do
    in rings of their own."""
    mbarrier.expect(kv_full, 2 * BLOCK_N * (WIDTH + WIDTH_V))
    at = [batch, head_kv, start_n, 0]
    tma.async_copy_global_to_shared(k_desc, at, kv_full, k_tiles.index(0))
    at = [batch, head_kv, start_n, 0]
    tma.async_copy_global_to_shared(v_desc, at, kv_full, v_tiles.index(0))
    start_m = begin
    for step in range(num_steps):
        row = (batch * num_heads_q + head_q) * 2 * padded_q + start_m
        slot = step % NUM_STAGES
        if step >= NUM_STAGES:
            named_barrier(SLOT + slot, SYNC_288)
        arrived = q_full.index(slot)
        mbarrier.expect(arrived, 2 * BLOCK_M * WIDTH + 4 * BLOCK_M)
        at = [batch, head_q, start_m, 0]
        tma.async_copy_global_to_shared(q_desc, at, arrived, q_ring.index(slot))
        tma.async_copy_global_to_shared(rows_desc, [row], arrived, lse_ring.index(slot))
        slot = step % DO_STAGES
        if step >= DO_STAGES:
            named_barrier(DO_SLOT + slot, SYNC_288)
        arrived = do_full.index(slot)
        mbarrier.expect(arrived, 2 * BLOCK_M * WIDTH_V + 4 * BLOCK_M)
        at = [batch, head_q, start_m, 0]
        tma.async_copy_global_to_shared(do_desc, at, arrived, do_ring.index(slot))
        row += padded_q
        tma.async_copy_global_to_shared(rows_desc, [row], arrived, delta_ring.index(slot))
        start_m += BLOCK_M
        head_q += (start_m >= end).to(gl.int32)
        start_m = gl.where(start_m >= end, begin, start_m)
    # So that all barriers end as they began.
    for last in gl.static_range(NUM_STAGES):
        if num_steps + last >= NUM_STAGES:
            named_barrier(SLOT + (num_steps + last) % NUM_STAGES, SYNC_288)
    for last in gl.static_range(DO_STAGES):
        if num_steps + last >= DO_STAGES:
            named_barrier(DO_SLOT + (num_steps + last) % DO_STAGES, SYNC_288)


@gluon.jit
def consume_dv(
    dv_desc,
    q_ring,
    k_tiles,
    v_tiles,
    do_ring,
    lse_ring,
    delta_ring,
    p_tile,
    kv_full,
    q_full,
    do_full,
    batch,
    head_kv,
    start_n,
    begin,
    end,
    num_steps,
    seqlen_q,
    seqlen_k,
    qk_scale,
    exp_scale,
    BLOCK_M: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    DO_STAGES: gl.constexpr,
):
    """One of two warpgroups: dv of BLOCK_N keys. P is recomputed from lse, and handed on.

    Tiles are transposed, keys first (FlashAttention-2, algorithm 2, the inner loop).
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    QUERIES: gl.constexpr = gl.SliceLayout(0, S)
    k = k_tiles.index(0).reshape([ROWS, 256])
    dv = gl.zeros([ROWS, 256], gl.float32, DV)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)
    mbarrier.wait(kv_full, 0)
    for step in range(num_steps):
        q_slot = step % NUM_STAGES
        do_slot = step % DO_STAGES
        q = q_ring.index(q_slot).reshape([BLOCK_M, 256])
        do = do_ring.index(do_slot).reshape([BLOCK_M, 256])
        mbarrier.wait(q_full.index(q_slot), step // NUM_STAGES & 1)
        qk = warpgroup_mma(
            k,
            q.permute((1, 0)),
            zeros,
            use_acc=False,
            is_async=True,
        )
        minus_lse = lse_ring.index(q_slot).load(QUERIES)
        qk = warpgroup_mma_wait(0, deps=(qk,))
        named_barrier(SLOT + q_slot, ARRIVE_288)
        s = score(qk, qk_scale)  # [64, BLOCK_M]
        p = probability(s, exp_scale, minus_lse[None, :])
        if step > 0:
            named_barrier(P_READ, SYNC_256)
        p_tile.store(p)
        named_barrier(P_READY, ARRIVE_256)
        mbarrier.wait(do_full.index(do_slot), step // DO_STAGES & 1)
        dv = warpgroup_mma(
            gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, DV, 2)),
            do,
            dv,
            is_async=True,
        )
        dv = warpgroup_mma_wait(0, deps=(dv,))
        named_barrier(DO_SLOT + do_slot, ARRIVE_288)

    if num_steps > 0:
        named_barrier(P_READ, SYNC_256)
    gl.thread_barrier()
    v_tiles.index(0).reshape([ROWS, 256]).store(dv.to(DTYPE))
    fence_async_shared()
    gl.thread_barrier()
    at = [batch, head_kv, start_n, 0]
    tma.async_copy_shared_to_global(dv_desc, at, v_tiles.index(0))
    tma.store_wait(0)


@gluon.jit
def consume_dk(
    dk_desc,
    q_ring,
    k_tiles,
    v_tiles,
    do_ring,
    lse_ring,
    delta_ring,
    p_tile,
    kv_full,
    q_full,
    do_full,
    batch,
    head_kv,
    start_n,
    begin,
    end,
    num_steps,
    seqlen_q,
    seqlen_k,
    softmax_scale,
    BLOCK_M: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    DO_STAGES: gl.constexpr,
):
    """The other warpgroup: dk of BLOCK_N keys, from the P that consume_dv hands on."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    QUERIES: gl.constexpr = gl.SliceLayout(0, S)
    v = v_tiles.index(0).reshape([ROWS, 256])
    dk = gl.zeros([ROWS, 256], gl.float32, DK)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)
    mbarrier.wait(kv_full, 0)
    for step in range(num_steps):
        q_slot = step % NUM_STAGES
        do_slot = step % DO_STAGES
        q = q_ring.index(q_slot).reshape([BLOCK_M, 256])
        do = do_ring.index(do_slot).reshape([BLOCK_M, 256])
        mbarrier.wait(do_full.index(do_slot), step // DO_STAGES & 1)
        dp = warpgroup_mma(
            v,
            do.permute((1, 0)),
            zeros,
            use_acc=False,
            is_async=True,
        )
        delta = delta_ring.index(do_slot).load(QUERIES)
        named_barrier(P_READY, SYNC_256)
        p = p_tile.load(S)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        named_barrier(P_READ, ARRIVE_256)  # of V too, where dv will leave
        named_barrier(DO_SLOT + do_slot, ARRIVE_288)
        ds = p * (dp - delta[None, :])
        ds_16 = ds.to(DTYPE)
        mbarrier.wait(q_full.index(q_slot), step // NUM_STAGES & 1)
        dk = warpgroup_mma(
            gl.convert_layout(ds_16, gl.DotOperandLayout(0, DK, 2)),
            q,
            dk,
            is_async=True,
        )
        dk = warpgroup_mma_wait(0, deps=(dk,))
        named_barrier(SLOT + q_slot, ARRIVE_288)

    # The last P came after the other warpgroup's last look at K, where dk leaves.
    k_tiles.index(0).reshape([ROWS, 256]).store((dk * softmax_scale).to(DTYPE))
    fence_async_shared()
    gl.thread_barrier()
    at = [batch, head_kv, start_n, 0]
    tma.async_copy_shared_to_global(dk_desc, at, k_tiles.index(0))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=RUN_TIME)
def attn_bwd_dkdv(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    rows_desc,
    dk_desc,
    dv_desc,
    padded_q,
    num_heads_q,
    num_heads,
    group_size,
    heads_per_run,
    seqlen_q,
    seqlen_k,
    softmax_scale,
    qk_scale,
    exp_scale,
    BLOCK_M: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    DO_STAGES: gl.constexpr,
):
    """One program: dk and dv of BLOCK_N keys, summed in float32 over the query heads that share
    them."""
    q_ring = tiles_of(q_desc, NUM_STAGES)
    k_tiles = tiles_of(k_desc, BLOCK_N // ROWS)
    v_tiles = tiles_of(v_desc, BLOCK_N // ROWS)
    do_ring = tiles_of(do_desc, DO_STAGES)
    lse_ring = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, BLOCK_M], rows_desc.layout)
    delta_ring = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK_M], rows_desc.layout)
    P_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], gl.float32)
    p_tile = gl.allocate_shared_memory(gl.float32, [ROWS, BLOCK_M], P_TILE)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [DO_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for slot in gl.static_range(NUM_STAGES):
        mbarrier.init(q_full.index(slot), count=1)
    for slot in gl.static_range(DO_STAGES):
        mbarrier.init(do_full.index(slot), count=1)
    fence_async_shared()

    num_tiles = gl.cdiv(seqlen_k, BLOCK_N)
    tile, head_shared = locate(gl.program_id(0), num_tiles, num_heads, heads_per_run)
    num_heads_kv = num_heads_q // group_size
    batch = head_shared // num_heads_kv
    head_kv = head_shared % num_heads_kv
    head_q = head_kv * group_size
    start_n = tile * BLOCK_N
    begin = 0
    end = seqlen_q
    num_steps = group_size * gl.cdiv(end - begin, BLOCK_M)
    gl.warp_specialize(
        [
            (
                consume_dv,
                (
                    dv_desc,
                    q_ring,
                    k_tiles,
                    v_tiles,
                    do_ring,
                    lse_ring,
                    delta_ring,
                    p_tile,
                    kv_full,
                    q_full,
                    do_full,
                    batch,
                    head_kv,
                    start_n,
                    begin,
                    end,
                    num_steps,
                    seqlen_q,
                    seqlen_k,
                    qk_scale,
                    exp_scale,
                    BLOCK_M,
                    NUM_STAGES,
                    DO_STAGES,
                ),
            ),
            (
                consume_dk,
                (
                    dk_desc,
                    q_ring,
                    k_tiles,
                    v_tiles,
                    do_ring,
                    lse_ring,
                    delta_ring,
                    p_tile,
                    kv_full,
                    q_full,
                    do_full,
                    batch,
                    head_kv,
                    start_n,
                    begin,
                    end,
                    num_steps,
                    seqlen_q,
                    seqlen_k,
                    softmax_scale,
                    BLOCK_M,
                    NUM_STAGES,
                    DO_STAGES,
                ),
            ),
            (
                produce_bwd,
                (
                    q_desc,
                    k_desc,
                    v_desc,
                    do_desc,
                    rows_desc,
                    q_ring,
                    k_tiles,
                    v_tiles,
                    do_ring,
                    lse_ring,
                    delta_ring,
                    kv_full,
                    q_full,
                    do_full,
                    batch,
                    head_q,
                    head_kv,
                    num_heads_q,
                    padded_q,
                    start_n,
                    begin,
                    end,
                    num_steps,
                    BLOCK_M,
                    NUM_STAGES,
                    DO_STAGES,
                ),
            ),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


@gluon.jit
def produce_dq(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    q_tiles,
    k_ring,
    v_ring,
    do_tiles,
    q_full,
    k_full,
    v_full,
    batch,
    head_q,
    head_kv,
    start_m,
    begin,
    num_steps,
    BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """The producer warp: q and do once, then the key tiles, K and V in rings of their own."""
    mbarrier.expect(q_full, 4 * ROWS * (WIDTH + WIDTH_V))
    for half in gl.static_range(2):
        row = start_m + half * ROWS
        at = [batch, head_q, row, 0]
        tma.async_copy_global_to_shared(q_desc, at, q_full, q_tiles.index(half))
        at = [batch, head_q, row, 0]
        tma.async_copy_global_to_shared(do_desc, at, q_full, do_tiles.index(half))
    for step in range(num_steps):
        row = begin + step * BLOCK_N
        slot = step % K_STAGES
        if step >= K_STAGES:
            named_barrier(K_SLOT + slot, SYNC_288)
        arrived = k_full.index(slot)
        mbarrier.expect(arrived, 2 * BLOCK_N * WIDTH)
        at = [batch, head_kv, row, 0]
        tma.async_copy_global_to_shared(k_desc, at, arrived, k_ring.index(slot))
        slot = step % V_STAGES
        if step >= V_STAGES:
            named_barrier(V_SLOT + slot, SYNC_288)
        arrived = v_full.index(slot)
        mbarrier.expect(arrived, 2 * BLOCK_N * WIDTH_V)
        at = [batch, head_kv, row, 0]
        tma.async_copy_global_to_shared(v_desc, at, arrived, v_ring.index(slot))
    # So that all barriers end as they began.
    for last in gl.static_range(K_STAGES):
        if num_steps + last >= K_STAGES:
            named_barrier(K_SLOT + (num_steps + last) % K_STAGES, SYNC_288)
    for last in gl.static_range(V_STAGES):
        if num_steps + last >= V_STAGES:
            named_barrier(V_SLOT + (num_steps + last) % V_STAGES, SYNC_288)


@gluon.jit
def consume_dq(
    CONSUMER: gl.constexpr,
    dq_desc,
    rows_ptr,
    q_tiles,
    k_ring,
    v_ring,
    do_tiles,
    q_full,
    k_full,
    v_full,
    batch,
    head_q,
    start_m,
    begin,
    full_end,
    num_steps,
    padded_q,
    num_heads_q,
    seqlen_k,
    softmax_scale,
    qk_scale,
    exp_scale,
    BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """One of two warpgroups: dq of 64 query rows; P is recomputed from lse."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    QUERIES: gl.constexpr = gl.SliceLayout(1, S)
    dq = gl.zeros([ROWS, 256], gl.float32, DQ)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    rows = start_m + CONSUMER * ROWS + gl.arange(0, ROWS, QUERIES)
    rows_head = rows_ptr + (batch * num_heads_q + head_q).to(gl.int64) * 2 * padded_q
    minus_lse = gl.load(rows_head + rows)
    delta = gl.load(rows_head + padded_q + rows)
    hi_i = gl.full([ROWS], 0, gl.int32, QUERIES) + seqlen_k
    mbarrier.wait(q_full, 0)
    for step in range(num_steps):
        start_n = begin + step * BLOCK_N
        k_slot = step % K_STAGES
        v_slot = step % V_STAGES
        own = opaque(CONSUMER)
        q = q_tiles.index(own).reshape([ROWS, 256])
        do = do_tiles.index(own).reshape([ROWS, 256])
        k = k_ring.index(k_slot).reshape([BLOCK_N, 256])
        v = v_ring.index(v_slot).reshape([BLOCK_N, 256])
        mbarrier.wait(k_full.index(k_slot), step // K_STAGES & 1)
        qk = warpgroup_mma(
            q,
            k.permute((1, 0)),
            zeros,
            use_acc=False,
            is_async=True,
        )
        mbarrier.wait(v_full.index(v_slot), step // V_STAGES & 1)
        dp = warpgroup_mma(
            do,
            v.permute((1, 0)),
            zeros,
            use_acc=False,
            is_async=True,
        )
        qk = warpgroup_mma_wait(1, deps=(qk,))
        s = score(qk, qk_scale)  # [64, BLOCK_N]
        p = probability(s, exp_scale, minus_lse[:, None])
        dp = warpgroup_mma_wait(0, deps=(dp,))
        named_barrier(V_SLOT + v_slot, ARRIVE_288)
        ds = p * (dp - delta[:, None])
        if start_n >= full_end:
            ds = hide_from(ds, hi_i - start_n)
        dq = warpgroup_mma(
            gl.convert_layout(ds.to(DTYPE), gl.DotOperandLayout(0, DQ, 2)),
            k,
            dq,
            is_async=True,
        )
        dq = warpgroup_mma_wait(0, deps=(dq,))
        named_barrier(K_SLOT + k_slot, ARRIVE_288)

    gl.thread_barrier()
    q = q_tiles.index(CONSUMER).reshape([ROWS, 256])
    q.store((dq * softmax_scale).to(DTYPE))
    fence_async_shared()
    gl.thread_barrier()
    row = start_m + CONSUMER * ROWS
    at = [batch, head_q, row, 0]
    tma.async_copy_shared_to_global(dq_desc, at, q_tiles.index(CONSUMER))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=RUN_TIME)
def attn_bwd_dq(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dq_desc,
    rows_ptr,
    padded_q,
    num_heads_q,
    num_heads,
    group_size,
    heads_per_run,
    seqlen_q,
    seqlen_k,
    softmax_scale,
    qk_scale,
    exp_scale,
    BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """One program: dq of 128 query rows of one head."""
    q_tiles = tiles_of(q_desc, 2)
    k_ring = tiles_of(k_desc, K_STAGES)
    v_ring = tiles_of(v_desc, V_STAGES)
    do_tiles = tiles_of(do_desc, 2)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for slot in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(slot), count=1)
    for slot in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(slot), count=1)
    fence_async_shared()

    num_tiles = gl.cdiv(seqlen_q, 2 * ROWS)
    tile, head = locate(gl.program_id(0), num_tiles, num_heads, heads_per_run)
    batch = head // num_heads_q
    head_q = head % num_heads_q
    head_kv = head_q // group_size
    start_m = tile * 2 * ROWS
    begin = 0
    full_end = seqlen_k // BLOCK_N * BLOCK_N
    end = seqlen_k
    num_steps = gl.cdiv(end - begin, BLOCK_N)
    gl.warp_specialize(
        [
            (
                consume_dq,
                (
                    0,
                    dq_desc,
                    rows_ptr,
                    q_tiles,
                    k_ring,
                    v_ring,
                    do_tiles,
                    q_full,
                    k_full,
                    v_full,
                    batch,
                    head_q,
                    start_m,
                    begin,
                    full_end,
                    num_steps,
                    padded_q,
                    num_heads_q,
                    seqlen_k,
                    softmax_scale,
                    qk_scale,
                    exp_scale,
                    BLOCK_N,
                    K_STAGES,
                    V_STAGES,
                ),
            ),
            (
                consume_dq,
                (
                    1,
                    dq_desc,
                    rows_ptr,
                    q_tiles,
                    k_ring,
                    v_ring,
                    do_tiles,
                    q_full,
                    k_full,
                    v_full,
                    batch,
                    head_q,
                    start_m,
                    begin,
                    full_end,
                    num_steps,
                    padded_q,
                    num_heads_q,
                    seqlen_k,
                    softmax_scale,
                    qk_scale,
                    exp_scale,
                    BLOCK_N,
                    K_STAGES,
                    V_STAGES,
                ),
            ),
            (
                produce_dq,
                (
                    q_desc,
                    k_desc,
                    v_desc,
                    do_desc,
                    q_tiles,
                    k_ring,
                    v_ring,
                    do_tiles,
                    q_full,
                    k_full,
                    v_full,
                    batch,
                    head_q,
                    head_kv,
                    start_m,
                    begin,
                    num_steps,
                    BLOCK_N,
                    K_STAGES,
                    V_STAGES,
                ),
            ),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


def descriptor(x, rows, columns, dtype=DTYPE.value):
    """TMA's view of a (batch, heads, seqlen, dim) tensor, in tiles of some rows of one head."""
    tile = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(tile, dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), tile, layout)


def plan(
    q,
    k,
    v,
    out,
    lse,
    do,
    dlse,
    dq,
    dk,
    dv,
    rows,
    *,
    softmax_scale,
    config_dkdv=CONFIG_DKDV,
    config_dq=CONFIG_DQ,
):
    """The launches of one call, as (kernel, grid, arguments, constants), in order.

    q, k, v, out, do, dq, dk, dv are (batch, heads, seqlen, dim), the last stride 1, and all but
    out have one dtype. Pointers and other strides must be multiples of 16 bytes.
    lse and dlse (or None) are (batch, heads, seqlen_q), float32, contiguous. rows is scratch:
    (batch, heads, 2, padded seqlen_q), float32, contiguous, padded to a multiple of 128.
    """
    batch, num_heads_q, seqlen_q, _ = q.shape
    num_heads_kv, seqlen_k = k.shape[1:3]
    group_size = num_heads_q // num_heads_kv
    qk_scale = softmax_scale
    exp_scale = softmax_scale * LOG2E.value
    heads_per_run = 1
    q_heads_per_run = 1
    padded_q = rows.shape[3]
    tiles = -(-padded_q // 64) * batch * num_heads_q
    preprocess = (
        out,
        *out.stride()[:3],
        do,
        *do.stride()[:3],
        lse if dlse is None else dlse,
        lse,
        rows,
        num_heads_q,
        seqlen_q,
        padded_q,
    )
    numbers = (
        seqlen_q,
        seqlen_k,
        softmax_scale,
        qk_scale,
        exp_scale,
    )
    block_m = config_dkdv["BLOCK_M"]
    row_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    dkdv = (
        descriptor(q, block_m, 256),
        descriptor(k, ROWS.value, 256),
        descriptor(v, ROWS.value, 256),
        descriptor(do, block_m, 256),
        TensorDescriptor(rows, [rows.numel()], [1], [block_m], row_layout),
        descriptor(dk, ROWS.value, 256),
        descriptor(dv, ROWS.value, 256),
        padded_q,
        num_heads_q,
        batch * num_heads_kv,
        group_size,
        heads_per_run,
        *numbers,
    )
    grid_n = -(-seqlen_k // BLOCK_N.value) * batch * num_heads_kv
    block_n = config_dq["BLOCK_N"]
    queries = (
        descriptor(q, ROWS.value, 256),
        descriptor(k, block_n, 256),
        descriptor(v, block_n, 256),
        descriptor(do, ROWS.value, 256),
        descriptor(dq, ROWS.value, 256),
        rows,
        padded_q,
        num_heads_q,
        batch * num_heads_q,
        group_size,
        q_heads_per_run,
        *numbers,
    )
    grid_m = -(-seqlen_q // (2 * ROWS.value)) * batch * num_heads_q
    first = {"BLOCK_M": 64, "HAS_DLSE": dlse is not None}
    return [
        (attn_bwd_preprocess, (tiles, 1, 1), preprocess, first),
        (attn_bwd_dkdv, (grid_n, 1, 1), dkdv, config_dkdv),
        (attn_bwd_dq, (grid_m, 1, 1), queries, config_dq),
    ]


def launch(*tensors, **numbers):
    """Run the kernels; takes what plan() takes and writes dq, dk and dv."""
    for kernel, grid, arguments, constants in plan(*tensors, **numbers):
        kernel[grid](*arguments, **constants)


def reference(q, k, v, *, softmax_scale, softcap=None, window_left=None, window_right=None):
    """The same in plain PyTorch, float32: out and lse."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.float(), *(x.float().repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(2, 3) * softmax_scale
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def example():
    """Random inputs with rows of whole 16 bytes, and the numbers launch() takes beside tensors."""
    device, heads, seqlen, dtype = "cuda", 16, 4096, torch.bfloat16

    def rows(dim):
        padded = -(-dim // 8) * 8
        return torch.randn(1, heads, seqlen, padded, device=device).to(dtype)[..., :dim]

    numbers = {
        "softmax_scale": HEAD_DIM.value**-0.5,
    }
    dropout = {}
    return [rows(HEAD_DIM.value), rows(HEAD_DIM.value), rows(HEAD_DIM_V.value)], numbers, dropout


def main():
    """Check against PyTorch on random data, then print the time."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("this kernel needs a GPU of compute capability 9.0, such as an H100")
    (q, k, v), numbers, dropout = example()
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    out, lse = reference(*leaves, **numbers)
    do = torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device).normal_()
    want = torch.autograd.grad(out, leaves, do.float())
    out, lse = out.detach().to(q.dtype), lse.detach()
    grads = [torch.empty_like(x) for x in (q, k, v)]
    padded = triton.cdiv(q.shape[2], 128) * 128
    scratch = [torch.empty(*q.shape[:2], 2, padded, device=q.device)]
    tensors = (q, k, v, out, lse, do, None, *grads, *scratch)
    launch(*tensors, **numbers, **dropout)
    for name, got, right in zip(("dq", "dk", "dv"), grads, want, strict=True):
        error = ((got.float() - right).norm() / right.norm()).item()
        print(f"{name}: relative error {error:.1e}")
        assert error < 2e-2, f"{name} does not agree with PyTorch"
    if q.is_cuda:
        ms = triton.testing.do_bench(lambda: launch(*tensors, **numbers, **dropout))
        print(f"{ms:.3f} ms for q of shape {tuple(q.shape)}")


if __name__ == "__main__":
    main()
