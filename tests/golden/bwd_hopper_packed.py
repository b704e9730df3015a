"""Attention backward: bfloat16, head_dim 128, causal, packed, for Hopper.

Emitted by attngen 0.1. Stands alone (torch and triton only): read, edit and run it.
  spec    head_dim=128,dtype=bfloat16,causal=true,layout=thd
  config  lowering=hopper,dq=atomic,block_m=64,num_stages=2,
          dv_first=false,drain_dv=true
  again   attngen emit SPEC --direction bwd --config CONFIG, with SPEC and CONFIG as above
softmax_scale, softcap, dropout_p, window sizes, lengths and strides are arguments of launch().
"""

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

HEAD_DIM = tl.constexpr(128)
HEAD_DIM_V = tl.constexpr(128)
DTYPE = tl.constexpr(tl.bfloat16)
UNIT = tl.constexpr(8)  # elements in 16 bytes
LOG2E = tl.constexpr(1.4426950408889634)
PRECISION = tl.constexpr("ieee")  # of float32 products; 16-bit ones ignore it
ROWS = tl.constexpr(64)  # that one warpgroup multiplies
BLOCK_N = tl.constexpr(128)  # keys of a program of attn_bwd_dkdv
WIDTH = tl.constexpr(128)  # columns of q and k in shared memory
WIDTH_V = tl.constexpr(128)  # and of v and do
FAR = tl.constexpr(1 << 30)  # where the rows of a sequence end, as its boxes count them
PADDING = tl.constexpr(128)  # row numbers of a sequence fill whole tiles of so many
RUN_TIME = [  # sizes, strides, positions and windows: a new value compiles nothing
    "num_heads_q",
    "num_heads",
    "group_size",
    "heads_per_run",
    "seqlen_q",
    "seqlen_k",
    "padded_q",
    "total_q",
    "total_k",
    "num_seqs",
    "q_start",
    "q_step",
    "k_start",
    "k_step",
    "align",
    "window_left",
    "window_right",
    "stride_qb",
    "stride_qh",
    "stride_qs",
    "stride_kb",
    "stride_kh",
    "stride_ks",
    "stride_vb",
    "stride_vh",
    "stride_vs",
    "stride_dob",
    "stride_doh",
    "stride_dos",
]

CONFIG_DKDV = {
    "BLOCK_M": 64,
    "NUM_STAGES": 2,
    "DV_FIRST": False,
    "DRAIN_DV": True,
    "num_warps": 4,
    "maxnreg": 168,
}
CONFIG_AGAIN = {
    "ROWS": 1024,
    "BLOCK_M": 64,
    "BLOCK_N": 32,
    "num_warps": 4,
    "num_stages": 1,
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
SYNC_256 = barrier_ptx("sync", 256)  # both consumers
# Numbers of barriers; of a ring, of its first slot.
DS_READY = tl.constexpr(7)
SLOT = tl.constexpr(8)


@gluon.jit
def tiles_of(descriptor, COUNT: gl.constexpr):
    """Shared memory for some tiles of a descriptor."""
    ROWS_OF_TILE: gl.constexpr = descriptor.block_shape[3]
    COLUMNS: gl.constexpr = descriptor.block_shape[4]
    return gl.allocate_shared_memory(
        descriptor.dtype, [COUNT, 1, 1, 1, ROWS_OF_TILE, COLUMNS], descriptor.layout
    )


@builtin
def reduce_add(descriptor, coordinates, source, _semantic=None):
    """TMA adds a tile in shared memory to global memory; Triton 3.6 has no name for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


@triton.jit
def locate(pid, num_tiles, num_heads, heads_per_run):
    """(tile, head) of a program: heads in runs whose K and V fit in L2, tile by tile in a run."""
    first = pid // (num_tiles * heads_per_run) * heads_per_run
    heads = tl.minimum(heads_per_run, num_heads - first)
    rest = pid - first * num_tiles
    return rest // heads, first + rest % heads


@triton.jit
def offset_of(cu_seqlens_ptr, n, num_seqs, total):
    """The row at which sequence n begins, never outside the tensor.

    Rows before sequence 0 count as sequence -1, rows behind the last one as sequence num_seqs.
    """
    at = tl.load(cu_seqlens_ptr + n, (n >= 0) & (n <= num_seqs), 0)
    return tl.where(n > num_seqs, total, tl.minimum(tl.maximum(at, 0), total))


@triton.jit
def find_tile(at, cu_seqlens_ptr, num_seqs, total, BLOCK: tl.constexpr):
    """(sequence, tile of it) of tile `at` of all.

    The tiles of sequence n have the numbers from offset // BLOCK + n + 1 on. That leaves room for
    each sequence's, so that the grid needs no lengths; some numbers have no tile.
    """
    sequence = -1
    span = num_seqs + 2
    while span > 1:
        step = tl.cdiv(span, 2)
        n = sequence + step
        first = offset_of(cu_seqlens_ptr, n, num_seqs, total) // BLOCK + n + 1
        sequence = tl.where((n <= num_seqs) & (first <= at), n, sequence)
        span = step
    first = offset_of(cu_seqlens_ptr, sequence, num_seqs, total) // BLOCK + sequence + 1
    return sequence, at - first


@triton.jit
def rows_of(sequence, cu_seqlens_ptr, used_ptr, num_seqs, total, HAS_USED: tl.constexpr):
    """A sequence's first row, how many rows it has, and how many of them are used."""
    begin = offset_of(cu_seqlens_ptr, sequence, num_seqs, total)
    owned = tl.maximum(offset_of(cu_seqlens_ptr, sequence + 1, num_seqs, total) - begin, 0)
    is_one = (sequence >= 0) & (sequence < num_seqs)
    used = tl.where(is_one, owned, 0)
    if HAS_USED:
        used = tl.minimum(used, tl.maximum(tl.load(used_ptr + sequence, is_one, 0), 0))
    return begin, owned, used


@triton.jit
def padded_from(begin, sequence):
    """Where the row numbers of a sequence begin: as its tiles of PADDING rows are numbered."""
    return (begin // PADDING + sequence + 1) * PADDING


@triton.jit
def padded_tile(start, cu_seqlens_ptr, used_ptr, num_seqs, total, HAS_USED: tl.constexpr):
    """Of the padded rows from `start` on, less than PADDING: their sequence, the first row in the
    tensor, and where the sequence's used rows end, and all its rows."""
    sequence, tile = find_tile(start // PADDING, cu_seqlens_ptr, num_seqs, total, PADDING)
    begin, owned, used = rows_of(sequence, cu_seqlens_ptr, used_ptr, num_seqs, total, HAS_USED)
    first = begin + tile * PADDING + start % PADDING
    return sequence, first, begin + used, begin + owned


@triton.jit
def rows_up_to(limit, start, step):
    """How many of the rows at positions start, start + step, ... stand at or before `limit`."""
    return tl.where(limit < start, 0, (tl.maximum(limit, start) - start) // step + 1)


@triton.jit
def visible_queries(
    first_row,
    last_row,
    seqlen_q,
    q_start,
    q_step,
    k_start,
    k_step,
    align,
):
    """Queries that see key rows first_row .. last_row: lo .. hi some, full_lo .. full_hi all."""
    first = k_start + first_row * k_step - align
    last = k_start + last_row * k_step - align
    lo = rows_up_to(first - 1, q_start, q_step)
    full_lo = rows_up_to(last - 1, q_start, q_step)
    hi = seqlen_q
    full_hi = seqlen_q
    return lo, full_lo, full_hi, hi


@triton.jit
def visible_keys(
    first_row,
    last_row,
    seqlen_k,
    q_start,
    q_step,
    k_start,
    k_step,
    align,
):
    """Keys that rows first_row .. last_row see: lo .. hi some row, full_lo .. full_hi every row."""
    first = q_start + first_row * q_step + align
    last = q_start + last_row * q_step + align
    hi = tl.minimum(rows_up_to(last, k_start, k_step), seqlen_k)
    full_hi = tl.minimum(rows_up_to(first, k_start, k_step), seqlen_k)
    lo = 0
    full_lo = 0
    return lo, full_lo, full_hi, hi


@triton.jit
def tile_ranges(lo, full_lo, full_hi, hi, BLOCK: tl.constexpr):
    """Round row ranges to tiles: partial ones in begin .. head and tail .. end, full between."""
    begin = lo // BLOCK * BLOCK
    end = tl.maximum(tl.cdiv(hi, BLOCK) * BLOCK, begin)
    head = tl.minimum(tl.cdiv(full_lo, BLOCK) * BLOCK, end)
    tail = tl.maximum(full_hi // BLOCK * BLOCK, head)
    return begin, head, tail, end


@triton.jit
def whole(stride):
    """A stride that is a multiple of 16 bytes, in a form that tells the compiler so."""
    return tl.cast(stride, tl.int64) // UNIT * UNIT


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
def finite(x):
    """x [rows, columns] with NaN and inf read as zero, and which rows had any."""
    good = tl.abs(x.to(tl.float32)) < float("inf")
    return tl.where(good, x, 0.0), tl.min(good.to(tl.int32), 1) == 0


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
    dq_sum_ptr,
    cu_seqlens_q_ptr,
    num_seqs,
    seqused_q_ptr,
    num_heads_q,
    seqlen_q,
    padded_q,
    BLOCK_M: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HAS_USED_Q: tl.constexpr,
):
    """Two numbers a query row: minus lse in base 2, and delta = rowsum(out * do) - dlse
    (FlashAttention-2, algorithm 2).

    Rows past the end, rows that see no key, and rows whose lse is too large for float32 to tell
    their P (their scores exceed 4e7) get lse = inf, and so P = 0 and no gradient.
    dq_sum, which attn_bwd_dkdv adds to, is set to zero.
    """
    num_tiles = tl.cdiv(padded_q, BLOCK_M)
    start_m = tl.program_id(0) % num_tiles * BLOCK_M
    head = tl.program_id(0) // num_tiles
    batch = head // num_heads_q
    head_q = head % num_heads_q
    to = head.to(tl.int64) * 2 * padded_q + start_m + tl.arange(0, BLOCK_M)
    _, start_m, used_end, owned_end = padded_tile(
        start_m,
        cu_seqlens_q_ptr,
        seqused_q_ptr,
        num_seqs,
        seqlen_q,
        HAS_USED_Q,
    )
    rows = start_m + tl.arange(0, BLOCK_M)
    inside = rows < used_end
    o_head = out_ptr + batch * tl.cast(stride_ob, tl.int64)
    o_head += head_q * tl.cast(stride_oh, tl.int64)
    do_head = do_ptr + batch * tl.cast(stride_gb, tl.int64)
    do_head += head_q * tl.cast(stride_gh, tl.int64)
    delta = tl.zeros([BLOCK_M], tl.float32)
    o = load_rows(
        o_head,
        stride_os,
        start_m,
        used_end,
        0,
        BLOCK_M,
        128,
        HEAD_DIM_V,
        True,
    )
    do = load_rows(
        do_head,
        stride_gs,
        start_m,
        used_end,
        0,
        BLOCK_M,
        128,
        HEAD_DIM_V,
        True,
    )
    delta += tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    at = head.to(tl.int64) * seqlen_q + rows
    lse = tl.load(lse_ptr + at, inside, float("-inf")) * LOG2E
    lost = tl.abs(lse) > 67108864.0
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + at, inside, 0.0)
    tl.store(rows_ptr + to, tl.where(lost, float("-inf"), -lse))
    tl.store(rows_ptr + to + padded_q, tl.where(lost, 0.0, delta))
    store_rows(
        dq_sum_ptr + head.to(tl.int64) * seqlen_q * HEAD_DIM,
        HEAD_DIM,
        start_m,
        owned_end,
        tl.zeros([BLOCK_M, 128], tl.float32),
        0,
        BLOCK_M,
        128,
        HEAD_DIM,
    )


@gluon.jit
def hide_before(x, first):
    """x with zeros left of column `first` of each row."""
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    return gl.where(columns[None, :] >= first[:, None], x, 0.0)


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
    full,
    begin_q,
    padded_begin,
    begin_k,
    seqlen_q,
    seqlen_k,
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
):
    """The producer warp: K and V once, then the query tiles of one head after the other."""
    mbarrier.expect(kv_full, 2 * BLOCK_N * (WIDTH + WIDTH_V))
    for half in gl.static_range(BLOCK_N // ROWS):
        row = start_n + half * ROWS
        at = [FAR, begin_k + seqlen_k, head_kv, FAR - seqlen_k + row, 0]
        tma.async_copy_global_to_shared(k_desc, at, kv_full, k_tiles.index(half))
        at = [FAR, begin_k + seqlen_k, head_kv, FAR - seqlen_k + row, 0]
        tma.async_copy_global_to_shared(v_desc, at, kv_full, v_tiles.index(half))
    start_m = begin
    for step in range(num_steps):
        slot = step % NUM_STAGES
        if step >= NUM_STAGES:
            named_barrier(SLOT + slot, SYNC_288)
        arrived = full.index(slot)
        mbarrier.expect(arrived, 2 * BLOCK_M * (WIDTH + WIDTH_V) + 8 * BLOCK_M)
        row = head_q * 2 * padded_q + padded_begin + start_m
        at = [FAR, begin_q + seqlen_q, head_q, FAR - seqlen_q + start_m, 0]
        tma.async_copy_global_to_shared(q_desc, at, arrived, q_ring.index(slot))
        tma.async_copy_global_to_shared(rows_desc, [row], arrived, lse_ring.index(slot))
        at = [FAR, begin_q + seqlen_q, head_q, FAR - seqlen_q + start_m, 0]
        tma.async_copy_global_to_shared(do_desc, at, arrived, do_ring.index(slot))
        row += padded_q
        tma.async_copy_global_to_shared(rows_desc, [row], arrived, delta_ring.index(slot))
        start_m += BLOCK_M
        head_q += (start_m >= end).to(gl.int32)
        start_m = gl.where(start_m >= end, begin, start_m)
    for last in gl.static_range(NUM_STAGES):  # so that all barriers end as they began
        if num_steps + last >= NUM_STAGES:
            named_barrier(SLOT + (num_steps + last) % NUM_STAGES, SYNC_288)


@gluon.jit
def consume_bwd(
    CONSUMER: gl.constexpr,
    dk_desc,
    dv_desc,
    dq_sum_desc,
    q_ring,
    k_tiles,
    v_tiles,
    do_ring,
    lse_ring,
    delta_ring,
    ds_tiles,
    dq_tile,
    kv_full,
    full,
    begin_q,
    begin_k,
    owned_k,
    head_q,
    head_kv,
    start_n,
    begin,
    full_begin,
    end,
    num_steps,
    seqlen_q,
    seqlen_k,
    softmax_scale,
    qk_scale,
    exp_scale,
    q_start,
    q_step,
    k_start,
    k_step,
    align,
    BLOCK_M: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    DV_FIRST: gl.constexpr,
    DRAIN_DV: gl.constexpr,
):
    """One of two warpgroups: dk and dv of 64 keys, and half of the columns of dq.

    Tiles are transposed, keys first (FlashAttention-2, algorithm 2, the inner loop); P is
    recomputed from lse. Each warpgroup makes dS of its keys, and reads all of it from
    shared memory.

    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    DV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    DQ_COLUMNS: gl.constexpr = dq_tile.shape[4]
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    QUERIES: gl.constexpr = gl.SliceLayout(0, S)
    k = k_tiles.index(CONSUMER).reshape([ROWS, 128])
    v = v_tiles.index(CONSUMER).reshape([ROWS, 128])
    FIRST_COLUMN: gl.constexpr = CONSUMER * DQ_COLUMNS
    dk = gl.zeros([ROWS, 128], gl.float32, DK)
    dv = gl.zeros([ROWS, 128], gl.float32, DV)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)
    rows = start_n + CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    lo_j, _, _, hi_j = visible_queries(
        rows,
        rows,
        seqlen_q,
        q_start,
        q_step,
        k_start,
        k_step,
        align,
    )
    # A key that no query sees is hidden from the rows past the end too: it may hold NaN.
    lo_j = gl.where(lo_j < seqlen_q, lo_j, seqlen_q + BLOCK_M)
    lo_j = gl.where(rows < seqlen_k, lo_j, seqlen_q)  # no query sees keys past the end
    shift = FAR - seqlen_q
    begin += shift
    end += shift
    full_begin += shift
    lo_j += shift
    start_m = begin
    mbarrier.wait(kv_full, 0)
    for step in range(num_steps):
        slot = step % NUM_STAGES
        q = q_ring.index(slot).reshape([BLOCK_M, 128])
        do = do_ring.index(slot).reshape([BLOCK_M, 128])
        mbarrier.wait(full.index(slot), step // NUM_STAGES & 1)
        qk = warpgroup_mma(
            k,
            q.permute((1, 0)),
            zeros,
            use_acc=False,
            is_async=True,
        )
        dp = warpgroup_mma(
            v,
            do.permute((1, 0)),
            zeros,
            use_acc=False,
            is_async=True,
        )
        qk = warpgroup_mma_wait(1, deps=(qk,))
        minus_lse = lse_ring.index(slot).load(QUERIES)
        s = score(qk, qk_scale)  # [64, BLOCK_M]
        p = probability(s, exp_scale, minus_lse[None, :])
        partial = start_m < full_begin
        if partial:
            p = hide_before(p, lo_j - start_m)
        p_16 = p.to(DTYPE)
        if DV_FIRST:
            dv = warpgroup_mma(
                gl.convert_layout(p_16, gl.DotOperandLayout(0, DV, 2)),
                do,
                dv,
                is_async=True,
            )
            delta = delta_ring.index(slot).load(QUERIES)
            dp = warpgroup_mma_wait(1, deps=(dp,))
        else:
            delta = delta_ring.index(slot).load(QUERIES)
            dp = warpgroup_mma_wait(0, deps=(dp,))
        ds = p * (dp - delta[None, :])
        if partial:
            ds = hide_before(ds, lo_j - start_m)
        ds_16 = ds.to(DTYPE)
        buffer = step % 2 * 2
        ds_tiles.index(buffer + CONSUMER).store(ds_16)
        if not DV_FIRST:
            dv = warpgroup_mma(
                gl.convert_layout(p_16, gl.DotOperandLayout(0, DV, 2)),
                do,
                dv,
                is_async=True,
            )
        fence_async_shared()
        tma.store_wait(0)  # the last dq has left its tile: the barrier tells all threads
        named_barrier(DS_READY, SYNC_256)
        if DRAIN_DV:  # frees the registers of P before dq needs some
            dv = warpgroup_mma_wait(0, deps=(dv,))
        ds_above = ds_tiles.index(buffer).permute((1, 0))
        ds_below = ds_tiles.index(buffer + 1).permute((1, 0))
        k_above = k_tiles.index(0).reshape([ROWS, WIDTH]).slice(FIRST_COLUMN, DQ_COLUMNS, dim=1)
        k_below = k_tiles.index(1).reshape([ROWS, WIDTH]).slice(FIRST_COLUMN, DQ_COLUMNS, dim=1)
        dq = gl.zeros([BLOCK_M, DQ_COLUMNS], gl.float32, DQ)
        dq = warpgroup_mma(ds_above, k_above, dq, use_acc=False, is_async=True)
        dq = warpgroup_mma(ds_below, k_below, dq, is_async=True)
        dk = warpgroup_mma(
            gl.convert_layout(ds_16, gl.DotOperandLayout(0, DK, 2)),
            q,
            dk,
            is_async=True,
        )
        dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
        dq_tile.reshape([BLOCK_M, DQ_COLUMNS]).store(dq)
        fence_async_shared()
        gl.thread_barrier()
        at = [FAR, begin_q + seqlen_q, head_q, start_m, FIRST_COLUMN]
        reduce_add(dq_sum_desc, at, dq_tile)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        named_barrier(SLOT + slot, ARRIVE_288)
        start_m += BLOCK_M
        head_q += (start_m >= end).to(gl.int32)
        start_m = gl.where(start_m >= end, begin, start_m)

    tma.store_wait(0)
    named_barrier(DS_READY, SYNC_256)  # the other warpgroup's dq reads all of K
    rows_of_dk = start_n + CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, DK))
    dk = gl.where((rows_of_dk < seqlen_k)[:, None], dk, 0.0)
    rows_of_dv = start_n + CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, DV))
    dv = gl.where((rows_of_dv < seqlen_k)[:, None], dv, 0.0)
    k.store((dk * softmax_scale).to(DTYPE))
    v.store(dv.to(DTYPE))
    fence_async_shared()
    gl.thread_barrier()
    row = start_n + CONSUMER * ROWS
    at = [FAR, begin_k + owned_k, head_kv, FAR - owned_k + row, 0]
    tma.async_copy_shared_to_global(dk_desc, at, k_tiles.index(CONSUMER))
    at = [FAR, begin_k + owned_k, head_kv, FAR - owned_k + row, 0]
    tma.async_copy_shared_to_global(dv_desc, at, v_tiles.index(CONSUMER))
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
    dq_sum_desc,
    padded_q,
    num_heads_q,
    num_heads,
    group_size,
    heads_per_run,
    total_q,
    total_k,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_q_ptr,
    seqused_k_ptr,
    num_seqs,
    softmax_scale,
    qk_scale,
    exp_scale,
    q_start,
    q_step,
    k_start,
    k_step,
    align,
    BLOCK_M: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    DV_FIRST: gl.constexpr,
    DRAIN_DV: gl.constexpr,
    HAS_USED_Q: tl.constexpr,
    HAS_USED_K: tl.constexpr,
):
    """One program: dk and dv of BLOCK_N keys, summed in float32 over the query heads that share
    them."""
    q_ring = tiles_of(q_desc, NUM_STAGES)
    k_tiles = tiles_of(k_desc, BLOCK_N // ROWS)
    v_tiles = tiles_of(v_desc, BLOCK_N // ROWS)
    do_ring = tiles_of(do_desc, NUM_STAGES)
    lse_ring = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, BLOCK_M], rows_desc.layout)
    delta_ring = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, BLOCK_M], rows_desc.layout)
    DS_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], DTYPE)
    ds_tiles = gl.allocate_shared_memory(DTYPE, [4, ROWS, BLOCK_M], DS_TILE)
    dq_tiles = tiles_of(dq_sum_desc, 2)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for slot in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(slot), count=1)
    fence_async_shared()

    num_tiles = total_k // BLOCK_N + num_seqs + 2
    tile, head_shared = locate(gl.program_id(0), num_tiles, num_heads, heads_per_run)
    num_heads_kv = num_heads_q // group_size
    sequence, tile = find_tile(tile, cu_seqlens_k_ptr, num_seqs, total_k, BLOCK_N)
    begin_k, owned_k, seqlen_k = rows_of(
        sequence,
        cu_seqlens_k_ptr,
        seqused_k_ptr,
        num_seqs,
        total_k,
        HAS_USED_K,
    )
    if (tile < 0) | (tile >= tl.cdiv(owned_k, BLOCK_N)):
        return
    begin_q, _, seqlen_q = rows_of(
        sequence,
        cu_seqlens_q_ptr,
        seqused_q_ptr,
        num_seqs,
        total_q,
        HAS_USED_Q,
    )
    align *= seqlen_k - seqlen_q
    padded_begin = padded_from(begin_q, sequence)
    head_kv = head_shared % num_heads_kv
    head_q = head_kv * group_size
    start_n = tile * BLOCK_N
    seqlen_q = gl.where(start_n < seqlen_k, seqlen_q, 0)  # no query sees keys that are not used
    last_row = gl.minimum(start_n + BLOCK_N, seqlen_k) - 1
    last_row = gl.maximum(last_row, start_n)  # in a tile of which no key is used
    lo, full_lo, full_hi, hi = visible_queries(
        start_n,
        last_row,
        seqlen_q,
        q_start,
        q_step,
        k_start,
        k_step,
        align,
    )
    begin, full_begin, full_end, end = tile_ranges(lo, full_lo, full_hi, hi, BLOCK_M)
    # No query sees keys past the end: all tiles of the last keys are partial.
    full_begin = gl.where(start_n + BLOCK_N > seqlen_k, end, full_begin)
    num_steps = group_size * gl.cdiv(end - begin, BLOCK_M)
    gl.warp_specialize(
        [
            (
                consume_bwd,
                (
                    0,
                    dk_desc,
                    dv_desc,
                    dq_sum_desc,
                    q_ring,
                    k_tiles,
                    v_tiles,
                    do_ring,
                    lse_ring,
                    delta_ring,
                    ds_tiles,
                    dq_tiles.index(0),
                    kv_full,
                    full,
                    begin_q,
                    begin_k,
                    owned_k,
                    head_q,
                    head_kv,
                    start_n,
                    begin,
                    full_begin,
                    end,
                    num_steps,
                    seqlen_q,
                    seqlen_k,
                    softmax_scale,
                    qk_scale,
                    exp_scale,
                    q_start,
                    q_step,
                    k_start,
                    k_step,
                    align,
                    BLOCK_M,
                    NUM_STAGES,
                    DV_FIRST,
                    DRAIN_DV,
                ),
            ),
            (
                consume_bwd,
                (
                    1,
                    dk_desc,
                    dv_desc,
                    dq_sum_desc,
                    q_ring,
                    k_tiles,
                    v_tiles,
                    do_ring,
                    lse_ring,
                    delta_ring,
                    ds_tiles,
                    dq_tiles.index(1),
                    kv_full,
                    full,
                    begin_q,
                    begin_k,
                    owned_k,
                    head_q,
                    head_kv,
                    start_n,
                    begin,
                    full_begin,
                    end,
                    num_steps,
                    seqlen_q,
                    seqlen_k,
                    softmax_scale,
                    qk_scale,
                    exp_scale,
                    q_start,
                    q_step,
                    k_start,
                    k_step,
                    align,
                    BLOCK_M,
                    NUM_STAGES,
                    DV_FIRST,
                    DRAIN_DV,
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
                    full,
                    begin_q,
                    padded_begin,
                    begin_k,
                    seqlen_q,
                    seqlen_k,
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
                ),
            ),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


@triton.jit(do_not_specialize=RUN_TIME)
def attn_bwd_dq_cast(
    dq_sum_ptr,
    dq_ptr,
    stride_dqb,
    stride_dqh,
    stride_dqs,
    rows_ptr,
    padded_q,
    cu_seqlens_q_ptr,
    num_seqs,
    num_heads_q,
    seqlen_q,
    softmax_scale,
    BLOCK_M: tl.constexpr,
):
    """dq = softmax_scale * dq_sum, in the dtype of q; marks rows that hold NaN for
    attn_bwd_dq_again, by NaN as their -lse."""
    num_tiles = tl.cdiv(padded_q, BLOCK_M)
    start_m = tl.program_id(0) % num_tiles * BLOCK_M
    head = tl.program_id(0) // num_tiles
    dq_head = dq_ptr + head // num_heads_q * tl.cast(stride_dqb, tl.int64)
    dq_head += head % num_heads_q * tl.cast(stride_dqh, tl.int64)
    rows = rows_ptr + head.to(tl.int64) * 2 * padded_q + start_m + tl.arange(0, BLOCK_M)
    _, start_m, _, owned_end = padded_tile(
        start_m,
        cu_seqlens_q_ptr,
        cu_seqlens_q_ptr,
        num_seqs,
        seqlen_q,
        False,
    )
    row_sums = tl.zeros([BLOCK_M], tl.float32)
    dq_sum = load_rows(
        dq_sum_ptr + head.to(tl.int64) * seqlen_q * HEAD_DIM,
        HEAD_DIM,
        start_m,
        owned_end,
        0,
        BLOCK_M,
        128,
        HEAD_DIM,
        True,
    )
    row_sums += tl.sum(dq_sum, 1)
    store_rows(
        dq_head,
        stride_dqs,
        start_m,
        owned_end,
        dq_sum * softmax_scale,
        0,
        BLOCK_M,
        128,
        HEAD_DIM,
    )
    tl.store(rows, float("nan"), row_sums != row_sums)


@triton.jit
def walk_keys(
    dq,
    q,
    do,
    minus_lse,
    delta,
    k_head,
    stride_ks,
    v_head,
    stride_vs,
    start_m,
    lo,
    hi,
    hi_i,
    seqlen_k,
    qk_scale,
    exp_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTIAL: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Add what the key tiles lo .. hi give to dq of one query tile; P is recomputed from lse.

    In PARTIAL tiles row i sees the keys 0 .. hi_i only. CAREFUL is for NaN and inf in hidden
    keys, whose dS is zero, but zero times NaN is NaN.
    """
    for start_n in tl.range(lo, hi, BLOCK_N, num_stages=1 if CAREFUL else None):
        k = load_rows(
            k_head,
            stride_ks,
            start_n,
            seqlen_k,
            0,
            BLOCK_N,
            128,
            HEAD_DIM,
            PARTIAL,
        )  # [BLOCK_N, 128]
        v = load_rows(
            v_head,
            stride_vs,
            start_n,
            seqlen_k,
            0,
            BLOCK_N,
            128,
            HEAD_DIM_V,
            PARTIAL,
        )  # [BLOCK_N, 128]
        qk = tl.dot(q, k.T, input_precision=PRECISION)
        s = score(qk, qk_scale)  # [BLOCK_M, BLOCK_N]
        p = probability(s, exp_scale, minus_lse[:, None])
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        if PARTIAL:
            columns = tl.arange(0, BLOCK_N)[None, :]
            keep = columns < (hi_i - start_n)[:, None]
            ds = tl.where(keep, ds, 0.0)
        ds = ds.to(k.dtype)
        if CAREFUL:
            k, _ = finite(k)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=RUN_TIME)
def attn_bwd_dq_again(
    q_ptr,
    stride_qb,
    stride_qh,
    stride_qs,
    k_ptr,
    stride_kb,
    stride_kh,
    stride_ks,
    v_ptr,
    stride_vb,
    stride_vh,
    stride_vs,
    do_ptr,
    stride_dob,
    stride_doh,
    stride_dos,
    lse_ptr,
    dq_ptr,
    stride_dqb,
    stride_dqh,
    stride_dqs,
    rows_ptr,
    padded_q,
    num_heads_q,
    group_size,
    total_q,
    total_k,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_q_ptr,
    seqused_k_ptr,
    num_seqs,
    softmax_scale,
    qk_scale,
    exp_scale,
    q_start,
    q_step,
    k_start,
    k_step,
    align,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_USED_Q: tl.constexpr,
    HAS_USED_K: tl.constexpr,
):
    """dq once more, with care, for the tiles in which a row's -lse was marked by NaN: its dq holds
    NaN, perhaps because zero dS times NaN in a hidden key is NaN. One program looks at ROWS rows
    of one head, and nearly always finds none."""
    num_tiles = total_q // ROWS + num_seqs + 2
    head = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    sequence, tile = find_tile(tile, cu_seqlens_q_ptr, num_seqs, total_q, ROWS)
    begin_q, owned_q, seqlen_q = rows_of(
        sequence,
        cu_seqlens_q_ptr,
        seqused_q_ptr,
        num_seqs,
        total_q,
        HAS_USED_Q,
    )
    if (tile < 0) | (tile >= tl.cdiv(owned_q, ROWS)):
        return
    begin_k, owned_k, seqlen_k = rows_of(
        sequence,
        cu_seqlens_k_ptr,
        seqused_k_ptr,
        num_seqs,
        total_k,
        HAS_USED_K,
    )
    align *= seqlen_k - seqlen_q
    first_row = tile * ROWS
    rows_head = rows_ptr + head.to(tl.int64) * 2 * padded_q + padded_from(begin_q, sequence)
    all_rows = first_row + tl.arange(0, ROWS)
    all_marks = tl.load(rows_head + all_rows, all_rows < seqlen_q, 0.0)
    if tl.max((all_marks != all_marks).to(tl.int32), 0) == 0:
        return
    head_q = head
    head_kv = head_q // group_size
    dq_head = dq_ptr + begin_q * tl.cast(stride_dqs, tl.int64)
    dq_head += head_q * tl.cast(stride_dqh, tl.int64)
    stride_qs = whole(stride_qs)
    q_head = q_ptr + begin_q * stride_qs
    q_head += head_q * whole(stride_qh)
    stride_ks = whole(stride_ks)
    k_head = k_ptr + begin_k * stride_ks
    k_head += head_kv * whole(stride_kh)
    stride_vs = whole(stride_vs)
    v_head = v_ptr + begin_k * stride_vs
    v_head += head_kv * whole(stride_vh)
    stride_dos = whole(stride_dos)
    do_head = do_ptr + begin_q * stride_dos
    do_head += head_q * whole(stride_doh)
    for start_m in range(first_row, tl.minimum(first_row + ROWS, seqlen_q), BLOCK_M):
        rows = start_m + tl.arange(0, BLOCK_M)
        marks = tl.load(rows_head + rows, rows < seqlen_q, 0.0)
        if tl.max((marks != marks).to(tl.int32), 0) > 0:
            q = load_rows(
                q_head,
                stride_qs,
                start_m,
                seqlen_q,
                0,
                BLOCK_M,
                128,
                HEAD_DIM,
                True,
            )  # [BLOCK_M, 128]
            dq = tl.zeros([BLOCK_M, 128], tl.float32)
            do = load_rows(
                do_head,
                stride_dos,
                start_m,
                seqlen_q,
                0,
                BLOCK_M,
                128,
                HEAD_DIM_V,
                True,
            )  # [BLOCK_M, 128]
            lse = tl.load(
                lse_ptr + head.to(tl.int64) * total_q + begin_q + rows,
                rows < seqlen_q,
                float("-inf"),
            )
            lost = tl.abs(lse * LOG2E) > 67108864.0  # as in attn_bwd_preprocess
            minus_lse = tl.where(lost, float("-inf"), -lse * LOG2E)
            delta = tl.load(rows_head + padded_q + rows, rows < seqlen_q, 0.0)
            last_row = tl.minimum(start_m + BLOCK_M, seqlen_q) - 1
            lo, _, _, hi = visible_keys(
                start_m,
                last_row,
                seqlen_k,
                q_start,
                q_step,
                k_start,
                k_step,
                align,
            )
            lo_i, _, _, hi_i = visible_keys(
                rows,
                rows,
                seqlen_k,
                q_start,
                q_step,
                k_start,
                k_step,
                align,
            )
            dq = walk_keys(
                dq,
                q,
                do,
                minus_lse,
                delta,
                k_head,
                stride_ks,
                v_head,
                stride_vs,
                start_m,
                lo // BLOCK_N * BLOCK_N,
                hi,
                hi_i,
                seqlen_k,
                qk_scale,
                exp_scale,
                BLOCK_M,
                BLOCK_N,
                PARTIAL=True,
                CAREFUL=True,
            )
            store_rows(
                dq_head,
                stride_dqs,
                start_m,
                seqlen_q,
                dq * softmax_scale,
                0,
                BLOCK_M,
                128,
                HEAD_DIM,
            )


def descriptor(x, rows, columns, dtype=DTYPE.value):
    """TMA's view of a (1, heads, total, dim) tensor, in tiles of some rows of one head, that knows
    where a sequence ends: row r of n rows that begin at row b is [FAR, b + n, head, FAR - n + r].

    Byte offsets are sums modulo 2^64, in which FAR steps of the first dim are minus FAR rows. Rows
    past the end lie past the end of the fourth dim.
    """
    _, heads, _, dim = x.shape
    _, head, row, _ = x.stride()
    shape = [2**31 - 1, 2**31 - 1, heads, FAR.value, dim]
    strides = [2**64 // FAR.value - row, row, head, row, 1]
    tile = [1, 1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(tile, dtype)
    return TensorDescriptor(x, shape, strides, tile, layout)


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
    dq_sum,
    *,
    softmax_scale,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q=None,
    seqused_k=None,
    q_start=0,
    q_step=1,
    k_start=0,
    k_step=1,
    align=0,
    config_dkdv=CONFIG_DKDV,
):
    """The launches of one call, as (kernel, grid, arguments, constants), in order.

    q, k, v, out, do, dq, dk, dv are (batch, heads, seqlen, dim), the last stride 1, and all but
    out have one dtype. Pointers and other strides must be multiples of 16 bytes.
    lse and dlse (or None) are (batch, heads, seqlen_q), float32, contiguous. rows is scratch:
    (1, heads, 2, (seqlen_q // 128 + num_seqs + 2) * 128), float32, contiguous.
    dq_sum is scratch: (batch, heads, seqlen_q, head_dim), float32, contiguous.
    batch is 1, and rows of all sequences follow one another; num_seqs of them begin at cu_seqlens,
    int32 (num_seqs + 1), on the device. seqused, int32 (num_seqs), if given, says how many rows of
    each are used. Other rows of out are 0.
    align 1 aligns the last query of each sequence with its last key, 0 the first ones.
    """
    batch, num_heads_q, seqlen_q, _ = q.shape
    num_heads_kv, seqlen_k = k.shape[1:3]
    group_size = num_heads_q // num_heads_kv
    num_seqs = cu_seqlens_q.shape[0] - 1
    qk_scale = softmax_scale
    exp_scale = softmax_scale * LOG2E.value
    row_bytes = (HEAD_DIM.value + HEAD_DIM_V.value) * q.element_size()
    heads_per_run = max(1, (16 << 20) // (seqlen_q * row_bytes))
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
        dq_sum,
        cu_seqlens_q,
        num_seqs,
        cu_seqlens_q if seqused_q is None else seqused_q,
        num_heads_q,
        seqlen_q,
        padded_q,
    )
    numbers = (
        seqlen_q,
        seqlen_k,
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_q if seqused_q is None else seqused_q,
        cu_seqlens_k if seqused_k is None else seqused_k,
        num_seqs,
        softmax_scale,
        qk_scale,
        exp_scale,
        q_start,
        q_step,
        k_start,
        k_step,
        align,
    )
    block_m = config_dkdv["BLOCK_M"]
    row_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    dkdv = (
        descriptor(q, block_m, 128),
        descriptor(k, ROWS.value, 128),
        descriptor(v, ROWS.value, 128),
        descriptor(do, block_m, 128),
        TensorDescriptor(rows, [rows.numel()], [1], [block_m], row_layout),
        descriptor(dk, ROWS.value, 128),
        descriptor(dv, ROWS.value, 128),
        descriptor(dq_sum, block_m, WIDTH.value // 2, gl.float32),
        padded_q,
        num_heads_q,
        batch * num_heads_kv,
        group_size,
        heads_per_run,
        *numbers,
    )
    grid_n = (seqlen_k // BLOCK_N.value + num_seqs + 2) * num_heads_kv
    cast = (
        dq_sum,
        dq,
        *dq.stride()[:3],
        rows,
        padded_q,
        cu_seqlens_q,
        num_seqs,
        num_heads_q,
        seqlen_q,
        softmax_scale,
    )
    tiles_q = -(-padded_q // 64) * batch * num_heads_q
    again = (
        q,
        *q.stride()[:3],
        k,
        *k.stride()[:3],
        v,
        *v.stride()[:3],
        do,
        *do.stride()[:3],
        lse,
        dq,
        *dq.stride()[:3],
        rows,
        padded_q,
        num_heads_q,
        group_size,
        *numbers,
    )
    again_grid = ((seqlen_q // CONFIG_AGAIN["ROWS"] + num_seqs + 2) * num_heads_q, 1, 1)
    used = {"HAS_USED_Q": seqused_q is not None, "HAS_USED_K": seqused_k is not None}
    config_dkdv = {**config_dkdv, **used}
    first = {"BLOCK_M": 64, "HAS_DLSE": dlse is not None}
    first["HAS_USED_Q"] = seqused_q is not None
    return [
        (attn_bwd_preprocess, (tiles, 1, 1), preprocess, first),
        (attn_bwd_dkdv, (grid_n, 1, 1), dkdv, config_dkdv),
        (attn_bwd_dq_cast, (tiles_q, 1, 1), cast, {"BLOCK_M": 64}),
        (attn_bwd_dq_again, again_grid, again, {**CONFIG_AGAIN, **used}),
    ]


def launch(*tensors, **numbers):
    """Run the kernels; takes what plan() takes and writes dq, dk and dv."""
    for kernel, grid, arguments, constants in plan(*tensors, **numbers):
        kernel[grid](*arguments, **constants)


def reference(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    **numbers,
):
    """The same in plain PyTorch, float32, one sequence after another: out and lse."""
    outs, lses = [], []
    for n in range(cu_seqlens_q.shape[0] - 1):
        rows, keys = (slice(*cu[n : n + 2].tolist()) for cu in (cu_seqlens_q, cu_seqlens_k))
        q_n, k_n, v_n = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        out, lse = of_sequence(q_n, k_n, v_n, **numbers)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def of_sequence(
    q,
    k,
    v,
    *,
    softmax_scale,
    softcap=None,
    window_left=None,
    window_right=None,
    align=0,
):
    """Attention of one sequence."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.float(), *(x.float().repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(2, 3) * softmax_scale
    rows_q = torch.arange(q.shape[2], device=q.device)[:, None]
    ahead = torch.arange(k.shape[2], device=q.device)[None, :] - rows_q
    s = s.masked_fill(ahead > 0, float("-inf"))
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def example():
    """Random inputs with rows of whole 16 bytes, and the numbers launch() takes beside tensors."""
    device, heads, seqlen, dtype = "cuda", 16, 4096, torch.bfloat16

    def rows(dim):
        padded = -(-dim // 8) * 8
        return torch.randn(1, heads, seqlen, padded, device=device).to(dtype)[..., :dim]

    # Four sequences, one of them empty.
    offsets = torch.tensor([0, seqlen // 4, seqlen // 4, seqlen - 3, seqlen], device=device).int()
    numbers = {
        "softmax_scale": HEAD_DIM.value**-0.5,
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
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
    padded = (q.shape[2] // 128 + numbers["cu_seqlens_q"].shape[0] + 1) * 128
    scratch = [torch.empty(*q.shape[:2], 2, padded, device=q.device)]
    scratch.append(torch.empty(q.shape, device=q.device))
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
