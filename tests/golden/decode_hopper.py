"""Attention decode: bfloat16, head_dim 576/512, paged, v in k, for Hopper.

Emitted by attngen 0.1. Stands alone (torch and triton only): read, edit and run it.
  spec    head_dim=576,head_dim_v=512,dtype=bfloat16,paged=true,shared_kv=true
  config  lowering=hopper,programs_per_sm=1,split_keys=0
  again   attngen emit SPEC --direction decode --config CONFIG, with SPEC and CONFIG as above
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

HEAD_DIM = tl.constexpr(576)
HEAD_DIM_V = tl.constexpr(512)
HALF = tl.constexpr(256)  # columns of V that a warpgroup multiplies
DTYPE = gl.bfloat16
UNIT = tl.constexpr(8)  # elements in 16 bytes
LOG2E = tl.constexpr(1.4426950408889634)
BLOCK_M = tl.constexpr(64)  # rows of a program
BLOCK_N = tl.constexpr(64)  # keys in a tile
NUM_STAGES = tl.constexpr(2)  # tiles in flight
RUN_TIME = [  # sizes, strides and lengths: a new value compiles nothing
    "num_splits",
    "num_heads_q",
    "num_heads_kv",
    "group_size",
    "num_rows",
    "seqlen_q",
    "seqlen_k",
    "stride_tb",
    "stride_qb",
    "stride_qh",
    "stride_qs",
    "stride_ob",
    "stride_oh",
    "stride_os",
]

CONFIG = {"SPLIT_KEYS": 0, "num_warps": 4, "maxnreg": 168}
MERGED = tl.constexpr(16)  # splits that the merge reads at a time


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


# Numbers of named barriers. They count threads: of both warpgroups that compute, or of one and the
# producer.
P_READY = tl.constexpr(6)  # weights, and what out is multiplied by
P_FREE = tl.constexpr(7)
REST_FREE = tl.constexpr(8)  # and the next, for each slot; so are the following ones
LEFT_FREE = tl.constexpr(10)
RIGHT_FREE = tl.constexpr(12)
P_ARRIVE, P_SYNC = (barrier_ptx(what, 256) for what in ("arrive", "sync"))
FREE_ARRIVE, FREE_SYNC = (barrier_ptx(what, 160) for what in ("arrive", "sync"))


def rescale_ptx(count):
    """PTX that multiplies a thread's `count` accumulators by alpha, unless alpha is 1 in all rows
    of its warp, and the constraints of its operands.

    A thread has two rows: accumulators 4i and 4i + 1 belong to one, 4i + 2 and 4i + 3 to the other.
    """
    first, second = 2 * count, 2 * count + 2  # the operands that hold their alphas
    ptx = "{ .reg .pred p, q; "
    ptx += f"setp.neu.f32 p, ${first}, 0f3F800000; "
    ptx += f"setp.neu.or.f32 p, ${second}, 0f3F800000, p; "
    ptx += "vote.sync.any.pred q, p, 0xffffffff; @!q bra.uni DONE; "
    for i in range(count):
        ptx += f"mul.f32 ${i}, ${count + i}, ${first if i % 4 < 2 else second}; "
    ptx += "DONE: }"
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["f"] * count
    return gl.constexpr(ptx), gl.constexpr(",".join(constraints))


RESCALE_256, OPERANDS_256 = rescale_ptx(128)


@gluon.jit
def rescale(acc, alpha, PTX: gl.constexpr, OPERANDS: gl.constexpr, CONDITIONAL: gl.constexpr):
    """acc * alpha; if CONDITIONAL, warps in which no row's maximum moved multiply nothing."""
    if CONDITIONAL:
        COUNT: gl.constexpr = acc.shape[1] // 2
        return gl.inline_asm_elementwise(
            PTX, OPERANDS, [acc, alpha[:, None]], gl.float32, is_pure=True, pack=COUNT
        )
    else:
        return acc * alpha[:, None]


@triton.jit
def whole(stride):
    """A stride that is a multiple of 16 bytes, in a form that tells the compiler so."""
    return tl.cast(stride, tl.int64) // UNIT * UNIT


@triton.jit
def score(qk, qk_scale):
    """The raw q.k: its scale is applied inside the exponential."""
    return qk


@gluon.jit
def rows_of(tile, group_size, seqlen_q, LAYOUT: gl.constexpr):
    """The rows of a tile, the heads of a query row next to each other, and which there are: past
    the end the last one is computed again."""
    rows = tile * BLOCK_M + gl.arange(0, BLOCK_M, LAYOUT)
    group_rows = seqlen_q * group_size
    return gl.minimum(rows, group_rows - 1), rows < group_rows


@gluon.jit
def load_q(
    q_head,
    stride_qh,
    stride_qs,
    tile,
    group_size,
    seqlen_q,
    smem,
    FIRST: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """Columns FIRST .. FIRST + WIDTH of the rows of a tile, into shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows, _ = rows_of(tile, group_size, seqlen_q, gl.SliceLayout(1, LAYOUT))
    at = rows % group_size * stride_qh + rows // group_size * stride_qs
    columns = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    smem.store(gl.load(q_head + (at[:, None] + columns[None, :])))


@gluon.jit
def count_tiles(begin, end):
    """Tiles of the keys begin .. end. A split of none gets one too, in which all is hidden."""
    return gl.maximum(gl.cdiv(end - begin, BLOCK_N), 1)


@gluon.jit
def clear_behind(smem, count):
    """Zero the keys from `count` on of half a tile of V: a weight of zero times NaN is NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    keep = (gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT)) < count)[:, None]
    for i in gl.static_range(HALF // 64):
        part = smem.slice(i * 64, 64, dim=1)
        part.store(gl.where(keep, part.load(LAYOUT), 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def store_half(
    acc,
    norm,
    out_ptr,
    stride_oh,
    stride_os,
    tile,
    row_zero,
    head_zero,
    group_size,
    seqlen_q,
    FIRST: gl.constexpr,
    IS_SPLIT: gl.constexpr,
):
    """Columns FIRST .. FIRST + HALF of the rows of out, or of a split's part."""
    LAYOUT: gl.constexpr = acc.type.layout
    rows, is_row = rows_of(tile, group_size, seqlen_q, gl.SliceLayout(1, LAYOUT))
    if IS_SPLIT:
        row = row_zero + rows % group_size * seqlen_q + rows // group_size
        at = row.to(gl.int64) * HEAD_DIM_V
    else:
        at = (head_zero + rows % group_size) * gl.cast(stride_oh, gl.int64)
        at += rows // group_size * gl.cast(stride_os, gl.int64)
    columns = FIRST + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    value = (acc * norm[:, None]).to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + (at[:, None] + columns[None, :]), value, is_row[:, None])


@gluon.jit
def attend_left(
    q_left,
    q_right,
    q_rest,
    left_smem,
    right_smem,
    rest_smem,
    left_full,
    right_full,
    rest_full,
    p_smem,
    factor_smem,
    out_ptr,
    stride_oh,
    stride_os,
    lse_ptr,
    l_ptr,
    m_ptr,
    tile,
    row_zero,
    head_zero,
    group_size,
    seqlen_q,
    begin,
    end,
    qk_scale,
    exp_scale,
    IS_SPLIT: gl.constexpr,
):
    """The first warpgroup: scores and weights, and the left half of out.

    Online softmax as in attend() of the portable lowering; acc is unnormalised, and m_i is the
    maximum of s, or up to 2^8 too small, which out and lse do not see: so acc is seldom rescaled.
    """
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    num_tiles = count_tiles(begin, end)
    acc = gl.zeros([BLOCK_M, HALF], gl.float32, OUT_LAYOUT)

    # The last keys first: they alone may be fewer than a tile.
    start_n = begin + (num_tiles - 1) * BLOCK_N
    stage = 0
    phase = 0
    p = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT)
    mbarrier.wait(rest_full.index(stage), phase)
    rest = rest_smem.index(stage).permute((1, 0))
    qk = warpgroup_mma(q_rest, rest, p, use_acc=False, is_async=True)
    mbarrier.wait(left_full.index(stage), phase)
    qk = warpgroup_mma(q_left, left_smem.index(stage).permute((1, 0)), qk, is_async=True)
    mbarrier.wait(right_full.index(stage), phase)
    qk = warpgroup_mma(q_right, right_smem.index(stage).permute((1, 0)), qk, is_async=True)
    qk = warpgroup_mma_wait(0, deps=[qk])
    named_barrier(REST_FREE, FREE_ARRIVE)
    s = score(qk, qk_scale)
    if start_n + BLOCK_N > end:
        columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
        s = gl.where((columns < end - start_n)[None, :], s, float("-inf"))
        clear_behind(left_smem.index(0), end - start_n)
    m_i = gl.max(s, 1)
    m_safe = gl.where(m_i == float("-inf"), 0.0, m_i)
    p = gl.exp2((s - m_safe[:, None]) * exp_scale)
    l_i = gl.sum(p, 1)
    p_smem.store(p.to(DTYPE))
    factor_smem.store(gl.full([BLOCK_M], 1.0, gl.float32, ROW_LAYOUT))
    fence_async_shared()

    for i in range(1, num_tiles):
        # P V of the last tile and Q K^T of this one; the other warpgroup multiplies its half of V
        # meanwhile.
        named_barrier(P_READY, P_ARRIVE)
        weights = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
        before = (i - 1) % NUM_STAGES
        acc = warpgroup_mma(weights, left_smem.index(before), acc, is_async=True)
        stage = i % NUM_STAGES
        phase = i // NUM_STAGES & 1
        mbarrier.wait(rest_full.index(stage), phase)
        rest = rest_smem.index(stage).permute((1, 0))
        qk = warpgroup_mma(q_rest, rest, p, use_acc=False, is_async=True)
        mbarrier.wait(left_full.index(stage), phase)
        qk = warpgroup_mma(q_left, left_smem.index(stage).permute((1, 0)), qk, is_async=True)
        mbarrier.wait(right_full.index(stage), phase)
        qk = warpgroup_mma(q_right, right_smem.index(stage).permute((1, 0)), qk, is_async=True)
        acc = warpgroup_mma_wait(3, deps=[acc])
        named_barrier(LEFT_FREE + before, FREE_ARRIVE)
        qk = warpgroup_mma_wait(0, deps=[qk])
        named_barrier(REST_FREE + stage, FREE_ARRIVE)
        s = score(qk, qk_scale)
        m_new = gl.maximum(m_i, gl.max(s, 1))
        m_new = gl.where((m_new - m_i) * exp_scale > 8.0, m_new, m_i)
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = gl.exp2((m_i - m_safe) * exp_scale)
        p = gl.exp2((s - m_safe[:, None]) * exp_scale)
        l_i = l_i * alpha + gl.sum(p, 1)
        m_i = m_new
        named_barrier(P_FREE, P_SYNC)
        p_smem.store(p.to(DTYPE))
        factor_smem.store(alpha)
        fence_async_shared()
        acc = rescale(
            acc,
            gl.convert_layout(alpha, gl.SliceLayout(1, OUT_LAYOUT)),
            RESCALE_256,
            OPERANDS_256,
            True,
        )

    named_barrier(P_READY, P_ARRIVE)
    before = (num_tiles - 1) % NUM_STAGES
    weights = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
    acc = warpgroup_mma(weights, left_smem.index(before), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    named_barrier(LEFT_FREE + before, FREE_ARRIVE)

    seen = l_i != 0.0  # false for a row that sees no key: its out is 0 and its lse -inf
    l_safe = gl.where(seen, l_i, 1.0)
    rows, is_row = rows_of(tile, group_size, seqlen_q, ROW_LAYOUT)
    row = row_zero + rows % group_size * seqlen_q + rows // group_size
    if IS_SPLIT:
        norm = gl.where(seen, 1.0, 0.0)
        gl.store(l_ptr + row, l_i, is_row)
        gl.store(m_ptr + row, m_i, is_row)
    else:
        norm = gl.where(seen, 1.0 / l_safe, 0.0)
        lse = (m_i * exp_scale + gl.log2(l_safe)) / LOG2E
        gl.store(lse_ptr + row, gl.where(seen, lse, float("-inf")), is_row)
    named_barrier(P_FREE, P_SYNC)
    factor_smem.store(norm)
    named_barrier(P_READY, P_ARRIVE)
    store_half(
        acc,
        gl.convert_layout(norm, gl.SliceLayout(1, OUT_LAYOUT)),
        out_ptr,
        stride_oh,
        stride_os,
        tile,
        row_zero,
        head_zero,
        group_size,
        seqlen_q,
        0,
        IS_SPLIT,
    )


@gluon.jit
def attend_right(
    right_smem,
    p_smem,
    factor_smem,
    out_ptr,
    stride_oh,
    stride_os,
    tile,
    row_zero,
    head_zero,
    group_size,
    seqlen_q,
    begin,
    end,
    IS_SPLIT: gl.constexpr,
):
    """The second warpgroup: the right half of out, by the weights that the first one makes."""
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    num_tiles = count_tiles(begin, end)
    acc = gl.zeros([BLOCK_M, HALF], gl.float32, OUT_LAYOUT)
    for i in range(num_tiles):
        stage = i % NUM_STAGES
        named_barrier(P_READY, P_SYNC)
        v = right_smem.index(stage)
        if i == 0:
            start_n = begin + (num_tiles - 1) * BLOCK_N
            if start_n + BLOCK_N > end:
                clear_behind(v, end - start_n)
        alpha = factor_smem.load(gl.SliceLayout(1, OUT_LAYOUT))
        acc = rescale(acc, alpha, RESCALE_256, OPERANDS_256, True)
        acc = warpgroup_mma(p_smem, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        named_barrier(P_FREE, P_ARRIVE)
        named_barrier(RIGHT_FREE + stage, FREE_ARRIVE)
    named_barrier(P_READY, P_SYNC)
    norm = factor_smem.load(gl.SliceLayout(1, OUT_LAYOUT))
    store_half(
        acc,
        norm,
        out_ptr,
        stride_oh,
        stride_os,
        tile,
        row_zero,
        head_zero,
        group_size,
        seqlen_q,
        HALF,
        IS_SPLIT,
    )


@gluon.jit
def fetch(
    k_desc,
    smem,
    full,
    table_row,
    head_kv,
    start_n,
    end,
    FIRST: gl.constexpr,
    WIDTH: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PIECE: gl.constexpr,
):
    """Columns FIRST .. FIRST + WIDTH of a tile of keys, in pieces of PIECE keys and 64 columns.

    So it lies in shared memory: 64 columns after the other, the keys of each row by row.
    Pieces behind the last key come from page 0.
    """
    KEY_PIECES: gl.constexpr = BLOCK_N // PIECE
    pieces = smem._reinterpret(DTYPE, [KEY_PIECES * WIDTH // 64, 1, 1, PIECE, 64], k_desc.layout)
    mbarrier.expect(full, BLOCK_N * WIDTH * 2)
    for i in gl.static_range(KEY_PIECES):
        key = start_n + i * PIECE
        page = gl.load(table_row + key // PAGE_SIZE, key < end, 0)
        for j in gl.static_range(WIDTH // 64):
            tma.async_copy_global_to_shared(
                k_desc,
                [page, head_kv, key % PAGE_SIZE, FIRST + j * 64],
                full,
                pieces.index(j * KEY_PIECES + i),
            )


@gluon.jit
def produce(
    k_desc,
    left_smem,
    right_smem,
    rest_smem,
    left_full,
    right_full,
    rest_full,
    table_row,
    head_kv,
    begin,
    end,
    PAGE_SIZE: gl.constexpr,
    PIECE: gl.constexpr,
):
    """The producer warp: fetch the tiles of K, from the last keys to the first.

    Each has three parts, in the order in which they are free again: the columns that V has not,
    and the left and the right half of V's.
    """
    num_tiles = count_tiles(begin, end)
    for i in range(num_tiles):
        stage = i % NUM_STAGES
        start_n = begin + (num_tiles - 1 - i) * BLOCK_N
        if i >= NUM_STAGES:
            named_barrier(REST_FREE + stage, FREE_SYNC)
        fetch(
            k_desc,
            rest_smem.index(stage),
            rest_full.index(stage),
            table_row,
            head_kv,
            start_n,
            end,
            HEAD_DIM_V,
            HEAD_DIM - HEAD_DIM_V,
            PAGE_SIZE,
            PIECE,
        )
        if i >= NUM_STAGES:
            named_barrier(LEFT_FREE + stage, FREE_SYNC)
        fetch(
            k_desc,
            left_smem.index(stage),
            left_full.index(stage),
            table_row,
            head_kv,
            start_n,
            end,
            0,
            HALF,
            PAGE_SIZE,
            PIECE,
        )
        if i >= NUM_STAGES:
            named_barrier(RIGHT_FREE + stage, FREE_SYNC)
        fetch(
            k_desc,
            right_smem.index(stage),
            right_full.index(stage),
            table_row,
            head_kv,
            start_n,
            end,
            HALF,
            HALF,
            PAGE_SIZE,
            PIECE,
        )
    # What is still held is freed too: no named barrier may stay half full.
    for i in range(gl.maximum(num_tiles - NUM_STAGES, 0), num_tiles):
        named_barrier(REST_FREE + i % NUM_STAGES, FREE_SYNC)
        named_barrier(LEFT_FREE + i % NUM_STAGES, FREE_SYNC)
        named_barrier(RIGHT_FREE + i % NUM_STAGES, FREE_SYNC)


@gluon.jit(do_not_specialize=RUN_TIME)
def attn_decode(
    q_ptr,
    stride_qb,
    stride_qh,
    stride_qs,
    k_desc,
    out_ptr,
    stride_ob,
    stride_oh,
    stride_os,
    lse_ptr,
    partials_ptr,
    num_splits,
    num_heads_kv,
    group_size,
    num_rows,
    seqlen_q,
    seqlen_k,
    seqused_k_ptr,
    block_table_ptr,
    stride_tb,
    qk_scale,
    exp_scale,
    SPLIT_KEYS: gl.constexpr,
    IS_SPLIT: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PIECE: gl.constexpr,
):
    """One program: BLOCK_M rows that share a key/value head against one split of its keys.

    Rows are the query rows of all heads of the group, the heads of a query row next to each other.
    A warp fetches tiles of K, whose first columns are V, and two warpgroups multiply them.
    """
    num_tiles = gl.cdiv(seqlen_q * group_size, BLOCK_M)
    tile = gl.program_id(0) % num_tiles
    split = gl.program_id(0) // num_tiles % num_splits
    head = gl.program_id(0) // num_tiles // num_splits
    batch = head // num_heads_kv
    head_kv = head % num_heads_kv
    head_zero = head_kv * group_size
    row_zero = head * group_size * seqlen_q  # of lse
    seqlen_k = gl.minimum(gl.maximum(gl.load(seqused_k_ptr + batch), 0), seqlen_k)
    table_row = block_table_ptr + batch.to(gl.int64) * stride_tb
    begin = 0
    end = seqlen_k
    out_ptr += batch * gl.cast(stride_ob, gl.int64)
    l_ptr = lse_ptr
    m_ptr = lse_ptr
    if IS_SPLIT:
        size = SPLIT_KEYS
        if SPLIT_KEYS == 0:
            size = gl.cdiv(gl.cdiv(seqlen_k, BLOCK_N), num_splits) * BLOCK_N
        begin = split * size
        end = gl.minimum(seqlen_k, begin + size)
        out_ptr = partials_ptr + split.to(gl.int64) * num_rows * (HEAD_DIM_V + 2)
        l_ptr = out_ptr + num_rows.to(gl.int64) * HEAD_DIM_V
        m_ptr = l_ptr + num_rows

    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_left = gl.allocate_shared_memory(DTYPE, [BLOCK_M, HALF], Q_LAYOUT)
    q_right = gl.allocate_shared_memory(DTYPE, [BLOCK_M, HALF], Q_LAYOUT)
    q_rest = gl.allocate_shared_memory(DTYPE, [BLOCK_M, HEAD_DIM - HEAD_DIM_V], Q_LAYOUT)
    left_smem = gl.allocate_shared_memory(DTYPE, [NUM_STAGES, BLOCK_N, HALF], Q_LAYOUT)
    right_smem = gl.allocate_shared_memory(DTYPE, [NUM_STAGES, BLOCK_N, HALF], Q_LAYOUT)
    rest_smem = gl.allocate_shared_memory(
        DTYPE, [NUM_STAGES, BLOCK_N, HEAD_DIM - HEAD_DIM_V], Q_LAYOUT
    )
    p_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_M, BLOCK_N], Q_LAYOUT)
    factor_smem = gl.allocate_shared_memory(
        gl.float32, [BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    left_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    right_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    rest_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(left_full.index(i), count=1)
        mbarrier.init(right_full.index(i), count=1)
        mbarrier.init(rest_full.index(i), count=1)
    q_head = q_ptr + batch * whole(stride_qb) + head_zero * whole(stride_qh)
    load_q(
        q_head,
        whole(stride_qh),
        whole(stride_qs),
        tile,
        group_size,
        seqlen_q,
        q_left,
        0,
        HALF,
    )
    load_q(
        q_head,
        whole(stride_qh),
        whole(stride_qs),
        tile,
        group_size,
        seqlen_q,
        q_right,
        HALF,
        HALF,
    )
    load_q(
        q_head,
        whole(stride_qh),
        whole(stride_qs),
        tile,
        group_size,
        seqlen_q,
        q_rest,
        HEAD_DIM_V,
        HEAD_DIM - HEAD_DIM_V,
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                attend_left,
                (
                    q_left,
                    q_right,
                    q_rest,
                    left_smem,
                    right_smem,
                    rest_smem,
                    left_full,
                    right_full,
                    rest_full,
                    p_smem,
                    factor_smem,
                    out_ptr,
                    stride_oh,
                    stride_os,
                    lse_ptr,
                    l_ptr,
                    m_ptr,
                    tile,
                    row_zero,
                    head_zero,
                    group_size,
                    seqlen_q,
                    begin,
                    end,
                    qk_scale,
                    exp_scale,
                    IS_SPLIT,
                ),
            ),
            (
                attend_right,
                (
                    right_smem,
                    p_smem,
                    factor_smem,
                    out_ptr,
                    stride_oh,
                    stride_os,
                    tile,
                    row_zero,
                    head_zero,
                    group_size,
                    seqlen_q,
                    begin,
                    end,
                    IS_SPLIT,
                ),
            ),
            (
                produce,
                (
                    k_desc,
                    left_smem,
                    right_smem,
                    rest_smem,
                    left_full,
                    right_full,
                    rest_full,
                    table_row,
                    head_kv,
                    begin,
                    end,
                    PAGE_SIZE,
                    PIECE,
                ),
            ),
        ],
        [4, 1],  # warps of all but the first
        [240, 24],  # their registers a thread
    )


@triton.jit
def merge_row(
    partials_ptr,
    row,
    out_row,
    lse_ptr,
    num_splits,
    num_rows,
    exp_scale,
):
    """A row of out and lse, from what the splits gave; those that saw no key count for nothing."""
    stride = num_rows.to(tl.int64) * (HEAD_DIM_V + 2)  # from split to split
    l_ptr = partials_ptr + num_rows.to(tl.int64) * HEAD_DIM_V + row
    m_ptr = l_ptr + num_rows
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([512], tl.float32)
    for first in range(0, num_splits, MERGED):
        splits = first + tl.arange(0, MERGED)
        is_split = splits < num_splits
        outs_ptr = partials_ptr + splits * stride + row.to(tl.int64) * HEAD_DIM_V
        m_i = tl.load(m_ptr + splits * stride, is_split, float("-inf"))
        l_i = tl.load(l_ptr + splits * stride, is_split, 0.0)
        columns = 0 + tl.arange(0, 512)
        inside = is_split[:, None]
        outs = tl.load(outs_ptr[:, None] + columns[None, :], inside, 0.0)  # [MERGED, 512]
        m_new = tl.maximum(top, tl.max(m_i, 0))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2((top - safe) * exp_scale)
        weights = tl.exp2((m_i - safe) * exp_scale)
        total = total * alpha + tl.sum(l_i * weights, 0)
        top = m_new
        outs = tl.where((l_i != 0.0)[:, None], outs, 0.0)  # else not written
        acc = acc * alpha + tl.sum(outs * weights[:, None], 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    seen = total != 0.0
    safe_total = tl.where(seen, total, 1.0)
    norm = tl.where(seen, 1.0 / safe_total, 0.0)
    lse = tl.where(seen, (safe * exp_scale + tl.log2(safe_total)) / LOG2E, float("-inf"))
    tl.store(lse_ptr + row, lse)
    columns = 0 + tl.arange(0, 512)
    value = (acc * norm).to(out_row.dtype.element_ty)
    tl.store(out_row + columns, value)


@triton.jit(do_not_specialize=RUN_TIME)
def attn_decode_merge(
    partials_ptr,
    out_ptr,
    stride_ob,
    stride_oh,
    stride_os,
    lse_ptr,
    num_splits,
    num_heads_q,
    num_rows,
    seqlen_q,
    exp_scale,
):
    """One program: a row of out, from what the splits gave."""
    row = tl.program_id(0)
    batch = (row // seqlen_q // num_heads_q).to(tl.int64)
    head_q = row // seqlen_q % num_heads_q
    out_row = out_ptr + batch * stride_ob + head_q * tl.cast(stride_oh, tl.int64)
    out_row += row % seqlen_q * tl.cast(stride_os, tl.int64)
    merge_row(
        partials_ptr,
        row,
        out_row,
        lse_ptr,
        num_splits,
        num_rows,
        exp_scale,
    )


def plan(
    q,
    k,
    v,
    out,
    lse,
    partials=None,
    *,
    softmax_scale,
    seqused_k,
    block_table,
    config=CONFIG,
):
    """The launches of one call, as (kernel, grid, arguments, constants).

    q and out are (batch, heads, seqlen, dim), k and v (pages, heads, page size, dim), the last
    stride 1. Pages hold a multiple of 16 keys. Pointers and other strides of q and k must be
    multiples of 16 bytes.
    lse is (batch, heads, seqlen_q), float32, contiguous, natural log. Scales are positive.
    partials is scratch, float32, contiguous: (number of splits, batch * heads * seqlen_q *
    (head_dim_v + 2)); None is one split.
    seqused_k (batch,), int32, contiguous, says how many keys of each batch row are used.
    block_table (batch, max pages), int32, the last stride 1, names the pages of each batch row.
    v is k's first columns, and is not read.
    """
    batch, num_heads_q, seqlen_q, _ = q.shape
    num_heads_kv, page_size = k.shape[1:3]
    seqlen_k = block_table.shape[1] * page_size
    piece = min(page_size & -page_size, BLOCK_N.value)
    num_rows = batch * num_heads_q * seqlen_q
    num_splits = 1 if partials is None else partials.shape[0]
    qk_scale = softmax_scale
    exp_scale = softmax_scale * LOG2E.value
    block = [1, 1, piece, 64]
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPE)
    arguments = (
        q,
        *q.stride()[:3],
        TensorDescriptor(k, list(k.shape), list(k.stride()), block, layout),
        out,
        *out.stride()[:3],
        lse,
        lse if partials is None else partials,
        num_splits,
        num_heads_kv,
        num_heads_q // num_heads_kv,
        num_rows,
        seqlen_q,
        seqlen_k,
        seqused_k,
        block_table,
        block_table.stride(0),
        qk_scale,
        exp_scale,
    )
    tiles = -(-seqlen_q * (num_heads_q // num_heads_kv) // BLOCK_M.value)
    grid = (tiles * num_splits * batch * num_heads_kv, 1, 1)
    constants = {**config, "IS_SPLIT": num_splits > 1, "PIECE": piece}
    constants["PAGE_SIZE"] = page_size
    launches = [(attn_decode, grid, arguments, constants)]
    if num_splits > 1:
        arguments = (
            partials,
            out,
            *out.stride()[:3],
            lse,
            num_splits,
            num_heads_q,
            num_rows,
            seqlen_q,
            exp_scale,
        )
        launches.append((attn_decode_merge, (num_rows, 1, 1), arguments, {"num_warps": 4}))
    return launches


def launch(*tensors, **numbers):
    """Run the kernels; takes what plan() takes and writes out and lse."""
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


ROWS = 2  # query rows of the check: the last of the sequence


def main():
    """Check against PyTorch on random data, then print the time."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("this kernel needs a GPU of compute capability 9.0, such as an H100")
    (q, k, _), numbers, _ = example()
    v = k[..., : HEAD_DIM_V.value]
    want, want_lse = (x[:, :, -ROWS:] for x in reference(q, k, v, **numbers))
    q, length = q[:, :, -ROWS:], k.shape[2]
    numbers["seqused_k"] = torch.full((1,), length, dtype=torch.int32, device=q.device)
    page_size, count = 16, -(-length // 16)
    order = torch.randperm(count + 2, device=q.device)[:count]
    pages = [
        x.new_full((count + 2, page_size, x.shape[1], -(-x.shape[3] // 8) * 8), float("nan"))
        for x in (k,)
    ]
    pages = [cache[..., : x.shape[3]] for cache, x in zip(pages, (k,), strict=True)]
    for cache, x in zip(pages, (k,), strict=True):
        padded = torch.nn.functional.pad(x[0].transpose(0, 1), (0, 0, 0, 0, 0, -length % page_size))
        cache[order] = padded.unflatten(0, (count, page_size))
    k = pages[0].transpose(1, 2)
    v = k[..., : HEAD_DIM_V.value]
    numbers["block_table"] = order.int()[None]
    out = torch.empty_like(want, dtype=q.dtype)
    lse = torch.empty(want.shape[:3], device=q.device)
    splits = 4
    partials = torch.empty(splits, lse.numel() * (HEAD_DIM_V.value + 2), device=q.device)
    for scratch in (None, partials):
        launch(q, k, v, out, lse, scratch, **numbers)
        error = ((out.float() - want).norm() / want.norm()).item()
        lse_error = (lse - want_lse).nan_to_num().abs().max().item()
        count = 1 if scratch is None else splits
        print(f"{count} splits: relative error of out {error:.1e}, largest of lse {lse_error:.1e}")
        assert error < 1e-2 and lse_error < 1e-2, "does not agree with PyTorch"
    if q.is_cuda:
        ms = triton.testing.do_bench(lambda: launch(q, k, v, out, lse, partials, **numbers))
        print(f"{ms:.3f} ms for q of shape {tuple(q.shape)} and {length} keys")


if __name__ == "__main__":
    main()
