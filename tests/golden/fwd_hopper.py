"""Attention forward: bfloat16, head_dim 128, causal, for Hopper.

Emitted by attngen 0.1. Stands alone (torch and triton only): read, edit and run it.
  spec    head_dim=128,dtype=bfloat16,causal=true
  config  lowering=hopper,consumers=2,block_n=128,num_stages=2,overlap=true,turns=true,
          q_in_registers=false,q_buffers=2,out_in_q=false,conditional_rescale=true,exp_polynomial=0,
          turn_ends=issued,mask_loop=false,late_sums=false,fences=false
  again   attngen emit SPEC --direction fwd --config CONFIG, with SPEC and CONFIG as above
softmax_scale, softcap, dropout_p, window sizes, lengths and strides are arguments of launch().
"""

import functools
import heapq

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

HEAD_DIM = tl.constexpr(128)
HEAD_DIM_V = tl.constexpr(128)
DTYPE = gl.bfloat16
UNIT = tl.constexpr(8)  # elements in 16 bytes
ROW_BYTES = tl.constexpr(256)  # of q and k in shared memory
ROW_BYTES_V = tl.constexpr(256)
LOG2E = tl.constexpr(1.4426950408889634)
LARGE = tl.constexpr(4096.0)  # of row maxima; beyond it, rounding s * exp_scale would show in P
LOWEST = tl.constexpr(-1.0e30)  # where row maxima begin: finite, so that no difference is NaN
PRECISION = tl.constexpr("ieee")  # of float32 products; 16-bit ones ignore it
RUN_TIME = [  # sizes, strides, positions and windows: a new value compiles nothing
    "num_heads_q",
    "num_heads",
    "group_size",
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
    "schedule_width",
    "stride_qb",
    "stride_qh",
    "stride_qs",
    "stride_kb",
    "stride_kh",
    "stride_ks",
    "stride_vb",
    "stride_vh",
    "stride_vs",
    "stride_ob",
    "stride_oh",
    "stride_os",
]

CONFIG = {
    "BLOCK_N": 128,
    "NUM_STAGES": 2,
    "OVERLAP": True,
    "TURNS": True,
    "Q_IN_REGISTERS": False,
    "Q_BUFFERS": 2,
    "OUT_IN_Q": False,
    "CONDITIONAL_RESCALE": True,
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
CONSUMERS = tl.constexpr(2)  # warpgroups of 64 query rows each


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


# Numbers of named barriers. They count threads: of all consumers and the producer, or of two
# consumers.
Q_FREE = tl.constexpr(6)  # and the next, for each buffer of Q
SLOT_FREE = tl.constexpr(8)  # and the next, for each slot of K and V
TURN = tl.constexpr(12)  # and the next, for each consumer
ARRIVE, SYNC = (barrier_ptx(what, 128 * CONSUMERS.value + 32) for what in ("arrive", "sync"))
TURN_ARRIVE, TURN_SYNC = (barrier_ptx(what, 256) for what in ("arrive", "sync"))


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


RESCALE_128, OPERANDS_128 = rescale_ptx(64)


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
def rows_up_to(limit, start, step):
    """How many of the rows at positions start, start + step, ... stand at or before `limit`."""
    return tl.where(limit < start, 0, (tl.maximum(limit, start) - start) // step + 1)


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


@gluon.jit
def key_tiles(
    start_m,
    seqlen_q,
    seqlen_k,
    q_start,
    q_step,
    k_start,
    k_step,
    align,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """begin, full_begin, full_end, end of the key tiles that rows start_m .. start_m + ROWS see;
    full ones lie between."""
    last_row = gl.minimum(start_m + ROWS, seqlen_q) - 1
    lo, full_lo, full_hi, hi = visible_keys(
        start_m,
        last_row,
        seqlen_k,
        q_start,
        q_step,
        k_start,
        k_step,
        align,
    )
    return tile_ranges(lo, full_lo, full_hi, hi, BLOCK_N)


@triton.jit
def score(qk, qk_scale):
    """The raw q.k: its scale is applied inside the exponential."""
    return qk


@gluon.jit
def hide_keys(
    s,
    start_n,
    hi_i,
):
    """-inf for the keys that a row does not see, in a tile that begins at key start_n.

    Columns are taken by eights, so that the accumulators of a thread are compared with constants;
    a comparison with the number of each column would take a register for each.
    """
    M: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1]
    groups = s.reshape([M, N // 8, 8])
    LAYOUT: gl.constexpr = groups.type.layout
    GROUP_LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    COLUMN_LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    firsts = gl.arange(0, N // 8, GROUP_LAYOUT)[None, :][:, :, None] * 8
    columns = gl.arange(0, 8, COLUMN_LAYOUT)[None, :][:, None, :]
    end = gl.convert_layout(hi_i - start_n, ROW_LAYOUT)[:, None][:, :, None]
    keep = firsts < end - columns
    return gl.convert_layout(gl.where(keep, groups, float("-inf")).reshape([M, N]), s.type.layout)


@gluon.jit
def softmax(s, m_i, l_i, exp_scale, CONDITIONAL_RESCALE: gl.constexpr):
    """p, m_i and l_i after one more tile of scores, and what acc must be multiplied by.

    m_i is the maximum of s itself. If CONDITIONAL_RESCALE, it stays while it is at most 2^8 too
    small: out and lse do not change by that, and acc need not be touched.
    """
    m_new = gl.maximum(m_i, gl.max(s, 1))
    if CONDITIONAL_RESCALE:
        m_new = gl.where((m_new - m_i) * exp_scale > 8.0, m_new, m_i)
    alpha = gl.exp2((m_i - m_new) * exp_scale)  # the difference first, or LOWEST would overflow
    p = gl.exp2(s * exp_scale - (m_new * exp_scale)[:, None])
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def store_tile(head_ptr, stride, start, limit, value, FIRST: gl.constexpr, DIM: gl.constexpr):
    """Write a tile to rows start .. below `limit`, columns FIRST .. below DIM, without TMA."""
    LAYOUT: gl.constexpr = value.type.layout
    rows = start + gl.arange(0, value.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = FIRST + gl.arange(0, value.shape[1], gl.SliceLayout(0, LAYOUT))
    ptrs = head_ptr + rows.to(gl.int64)[:, None] * stride + columns[None, :]
    inside = (rows < limit)[:, None] & (columns < DIM)[None, :]
    gl.store(ptrs, value.to(head_ptr.dtype.element_ty), inside)


@gluon.jit
def produce(
    q_desc,
    k_desc,
    q_smem,
    k_smem,
    v_desc,
    v_smem,
    q_full,
    slot_full,
    schedule_ptr,
    schedule_width,
    num_heads_q,
    group_size,
    seqlen_q,
    seqlen_k,
    q_start,
    q_step,
    k_start,
    k_step,
    align,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    Q_BUFFERS: gl.constexpr,
):
    """The producer warp: fetch Q of each work item, and its K and V tiles into a ring of slots.

    Slot i of an item holds K of its tile i and V of tile i - 1, from the last keys to the first, so
    that Q K^T of a tile and P V of the one before go to the tensor cores together.
    """
    BLOCK_M: gl.constexpr = CONSUMERS * 64
    num_row_tiles = gl.cdiv(seqlen_q, BLOCK_M)
    count = 0  # of items so far
    slot = 0  # of all items
    schedule_ptr += gl.program_id(0) * schedule_width
    item = gl.load(schedule_ptr)
    while item >= 0:
        start_m = item % num_row_tiles * BLOCK_M
        batch = item // num_row_tiles // num_heads_q
        head_q = item // num_row_tiles % num_heads_q
        head_kv = head_q // group_size
        begin, _, _, end = key_tiles(
            start_m,
            seqlen_q,
            seqlen_k,
            q_start,
            q_step,
            k_start,
            k_step,
            align,
            BLOCK_M,
            BLOCK_N,
        )
        # Rows that see no key get a tile too, in which all is hidden.
        num_tiles = gl.maximum((end - begin) // BLOCK_N, 1)

        buffer = count % Q_BUFFERS
        if count >= Q_BUFFERS:
            named_barrier(Q_FREE + buffer, SYNC)
        mbarrier.expect(q_full.index(buffer), BLOCK_M * ROW_BYTES)
        for i in gl.static_range(CONSUMERS):
            tma.async_copy_global_to_shared(
                q_desc,
                [batch, head_q, start_m + i * 64, 0],
                q_full.index(buffer),
                q_smem.index(buffer * CONSUMERS + i),
            )
        count += 1
        item = gl.load(schedule_ptr + count)

        for i in range(num_tiles + 1):
            stage = slot % NUM_STAGES
            if slot >= NUM_STAGES:
                named_barrier(SLOT_FREE + stage, SYNC)
            full = slot_full.index(stage)
            has_k = i < num_tiles
            has_v = i > 0
            if has_k & has_v:
                mbarrier.expect(full, BLOCK_N * (ROW_BYTES + ROW_BYTES_V))
            elif has_k:
                mbarrier.expect(full, BLOCK_N * ROW_BYTES)
            else:
                mbarrier.expect(full, BLOCK_N * ROW_BYTES_V)
            start_n = begin + (num_tiles - 1 - i) * BLOCK_N
            tma.async_copy_global_to_shared(
                k_desc,
                [batch, head_kv, start_n, 0],
                full,
                k_smem.index(stage),
                pred=has_k,
            )
            tma.async_copy_global_to_shared(
                v_desc,
                [batch, head_kv, start_n + BLOCK_N, 0],
                full,
                v_smem.index(stage),
                pred=has_v,
            )
            slot += 1
    # What is still held is freed too: no named barrier may stay half full.
    for i in gl.static_range(Q_BUFFERS):
        if count + i >= Q_BUFFERS:
            named_barrier(Q_FREE + (count + i) % Q_BUFFERS, SYNC)
    for i in gl.static_range(NUM_STAGES):
        if slot + i >= NUM_STAGES:
            named_barrier(SLOT_FREE + (slot + i) % NUM_STAGES, SYNC)


@gluon.jit
def consume(
    CONSUMER: gl.constexpr,
    q_smem,
    k_smem,
    v_smem,
    out_smem,
    out_desc,
    out_ptr,
    stride_ob,
    stride_oh,
    stride_os,
    lse_ptr,
    q_full,
    slot_full,
    schedule_ptr,
    schedule_width,
    num_heads_q,
    seqlen_q,
    seqlen_k,
    qk_scale,
    exp_scale,
    q_start,
    q_step,
    k_start,
    k_step,
    align,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
    TURNS: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr,
    Q_BUFFERS: gl.constexpr,
    OUT_IN_Q: gl.constexpr,
    CONDITIONAL_RESCALE: gl.constexpr,
    TMA_OUT: gl.constexpr,
):
    """One consumer, a warpgroup: 64 query rows of each work item against every key they see.

    Online softmax as in attend(); acc is unnormalised, and m_i is the maximum of s.
    """
    BLOCK_M: gl.constexpr = CONSUMERS * 64
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 2)
    num_row_tiles = gl.cdiv(seqlen_q, BLOCK_M)
    count = 0  # of items so far
    slot = 0  # of all items
    if TURNS and CONSUMER == CONSUMERS - 1:
        named_barrier(TURN, TURN_ARRIVE)  # the first turn is consumer 0's
    schedule_ptr += gl.program_id(0) * schedule_width
    item = gl.load(schedule_ptr)
    while item >= 0:
        head = item // num_row_tiles
        start_block = item % num_row_tiles * BLOCK_M
        start_m = start_block + CONSUMER * 64
        begin, _, _, end = key_tiles(
            start_block,
            seqlen_q,
            seqlen_k,
            q_start,
            q_step,
            k_start,
            k_step,
            align,
            BLOCK_M,
            BLOCK_N,
        )
        # Rows that see no key get a tile too, in which all is hidden.
        num_tiles = gl.maximum((end - begin) // BLOCK_N, 1)
        _, _, full_end, _ = key_tiles(
            start_m,
            seqlen_q,
            seqlen_k,
            q_start,
            q_step,
            k_start,
            k_step,
            align,
            64,
            BLOCK_N,
        )
        rows = start_m + gl.arange(0, 64, ROW_LAYOUT)
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
        acc = gl.zeros([64, 128], gl.float32, OUT_LAYOUT)
        l_i = gl.zeros([64], gl.float32, ROW_LAYOUT)
        m_i = gl.full([64], LOWEST, gl.float32, ROW_LAYOUT)

        buffer = count % Q_BUFFERS
        mbarrier.wait(q_full.index(buffer), count // Q_BUFFERS & 1)
        q_rows = q_smem.index(buffer * CONSUMERS + CONSUMER)
        if Q_IN_REGISTERS:
            q = q_rows.reshape([64, 128]).load(gl.DotOperandLayout(0, S_LAYOUT, 2))
            if not OUT_IN_Q:
                named_barrier(Q_FREE + buffer, ARRIVE)
        else:
            q = q_rows.reshape([64, 128])
        count += 1
        item = gl.load(schedule_ptr + count)

        # The last keys first: they hold the diagonal and the end of the sequence.
        start_n = begin + (num_tiles - 1) * BLOCK_N
        stage = slot % NUM_STAGES
        mbarrier.wait(slot_full.index(stage), slot // NUM_STAGES & 1)
        if TURNS:
            named_barrier(TURN + CONSUMER, TURN_SYNC)
        p = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
        k = k_smem.index(stage).reshape([BLOCK_N, 128])
        qk = warpgroup_mma(q, k.permute((1, 0)), p, use_acc=False, is_async=True)
        if TURNS:
            named_barrier(TURN + (CONSUMER + 1) % CONSUMERS, TURN_ARRIVE)
        qk = warpgroup_mma_wait(0, deps=[qk])
        named_barrier(SLOT_FREE + stage, ARRIVE)
        s = score(qk, qk_scale)  # [64, BLOCK_N]
        if start_n >= full_end:
            s = hide_keys(s, start_n, hi_i)
        p, m_i, l_i, alpha = softmax(s, m_i, l_i, exp_scale, CONDITIONAL_RESCALE)
        slot += 1
        mbarrier.wait(slot_full.index(slot % NUM_STAGES), slot // NUM_STAGES & 1)

        for _ in range(1, num_tiles):
            start_n -= BLOCK_N
            stage = slot % NUM_STAGES
            if TURNS:
                named_barrier(TURN + CONSUMER, TURN_SYNC)
            k = k_smem.index(stage).reshape([BLOCK_N, 128])
            qk = warpgroup_mma(q, k.permute((1, 0)), p, use_acc=False, is_async=True)
            weights = p.to(DTYPE)
            acc = warpgroup_mma(
                gl.convert_layout(weights, P_LAYOUT),
                v_smem.index(stage).reshape([BLOCK_N, 128]),
                acc,
                is_async=True,
            )
            if TURNS:
                named_barrier(TURN + (CONSUMER + 1) % CONSUMERS, TURN_ARRIVE)
            if OVERLAP:
                qk = warpgroup_mma_wait(1, deps=[qk])
            else:
                qk, acc = warpgroup_mma_wait(0, deps=[qk, acc])
                named_barrier(SLOT_FREE + stage, ARRIVE)
            s = score(qk, qk_scale)
            if start_n >= full_end:
                s = hide_keys(s, start_n, hi_i)
            p, m_i, l_i, alpha = softmax(s, m_i, l_i, exp_scale, CONDITIONAL_RESCALE)
            # Waiting for the next slot here also ends the basic block: ptxas would move the wait
            # for acc above the exponentials.
            slot += 1
            mbarrier.wait(slot_full.index(slot % NUM_STAGES), slot // NUM_STAGES & 1)
            if OVERLAP:
                acc, p = warpgroup_mma_wait(0, deps=[acc, p])
                named_barrier(SLOT_FREE + stage, ARRIVE)
            acc = rescale(
                acc,
                gl.convert_layout(alpha, gl.SliceLayout(1, OUT_LAYOUT)),
                RESCALE_128,
                OPERANDS_128,
                CONDITIONAL_RESCALE,
            )

        if not Q_IN_REGISTERS and not OUT_IN_Q:
            named_barrier(Q_FREE + buffer, ARRIVE)
        stage = slot % NUM_STAGES  # V of the first keys
        weights = p.to(DTYPE)
        acc = warpgroup_mma(
            gl.convert_layout(weights, P_LAYOUT),
            v_smem.index(stage).reshape([BLOCK_N, 128]),
            acc,
            is_async=True,
        )
        acc = warpgroup_mma_wait(0, deps=[acc])
        named_barrier(SLOT_FREE + stage, ARRIVE)
        slot += 1

        seen = l_i != 0.0  # false for a row that sees no key: its out is 0 and its lse -inf
        lse = gl.where(seen, m_i * exp_scale + gl.log2(gl.where(seen, l_i, 1.0)), float("-inf"))
        row_sums = gl.convert_layout(gl.sum(acc, 1), ROW_LAYOUT)
        again = ~(gl.abs(row_sums) < float("inf"))  # perhaps of hidden keys
        again |= gl.where(m_i == LOWEST, lo_i < hi_i, gl.abs(m_i * exp_scale) > LARGE)
        lse = gl.where(again, float("nan"), lse / LOG2E)  # NaN: attn_fwd_again shall look at it
        gl.store(lse_ptr + head.to(gl.int64) * seqlen_q + rows, lse, rows < seqlen_q)
        norm = gl.where(seen, 1.0 / gl.where(seen, l_i, 1.0), 0.0)
        norm = gl.convert_layout(norm, gl.SliceLayout(1, OUT_LAYOUT))
        out = acc * norm[:, None]
        batch = head // num_heads_q
        head_q = head % num_heads_q
        if TMA_OUT:
            tma.store_wait(0)  # what left through this memory before
            gl.thread_barrier()
            out_rows = q_rows if OUT_IN_Q else out_smem.index(CONSUMER)
            out_rows.reshape([64, 128]).store(out.to(DTYPE))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(
                out_desc,
                [batch, head_q, start_m, 0],
                out_rows,
            )
        else:
            out_head = out_ptr + batch * gl.cast(stride_ob, gl.int64)
            out_head += head_q * gl.cast(stride_oh, gl.int64)
            store_tile(out_head, stride_os, start_m, seqlen_q, out, 0, HEAD_DIM_V)
        if OUT_IN_Q:
            tma.store_wait(0)
            gl.thread_barrier()
            named_barrier(Q_FREE + buffer, ARRIVE)
    if TURNS and CONSUMER == 0:
        named_barrier(TURN, TURN_SYNC)  # the last turn that was passed on
    tma.store_wait(0)


@gluon.jit(do_not_specialize=RUN_TIME)
def attn_fwd(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    out_ptr,
    stride_ob,
    stride_oh,
    stride_os,
    lse_ptr,
    schedule_ptr,
    schedule_width,
    num_heads_q,
    group_size,
    seqlen_q,
    seqlen_k,
    qk_scale,
    exp_scale,
    q_start,
    q_step,
    k_start,
    k_step,
    align,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
    TURNS: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr,
    Q_BUFFERS: gl.constexpr,
    OUT_IN_Q: gl.constexpr,
    CONDITIONAL_RESCALE: gl.constexpr,
    TMA_OUT: gl.constexpr,
):
    """One program on each SM, which works off its row of the schedule: a producer warp that
    fetches, and CONSUMERS warpgroups that compute."""
    q_smem = gl.allocate_shared_memory(
        DTYPE,
        [Q_BUFFERS * CONSUMERS, 1, 1, 64, 128],
        q_desc.layout,
    )
    k_smem = gl.allocate_shared_memory(
        DTYPE,
        [NUM_STAGES, 1, 1, BLOCK_N, 128],
        k_desc.layout,
    )
    v_smem = gl.allocate_shared_memory(
        DTYPE,
        [NUM_STAGES, 1, 1, BLOCK_N, 128],
        v_desc.layout,
    )
    if TMA_OUT and not OUT_IN_Q:
        out_smem = gl.allocate_shared_memory(
            DTYPE,
            [CONSUMERS, 1, 1, 64, 128],
            out_desc.layout,
        )
    else:
        out_smem = v_smem  # unused
    q_full = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS, 1], mbarrier.MBarrierLayout())
    slot_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_BUFFERS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(slot_full.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    0,
                    q_smem,
                    k_smem,
                    v_smem,
                    out_smem,
                    out_desc,
                    out_ptr,
                    stride_ob,
                    stride_oh,
                    stride_os,
                    lse_ptr,
                    q_full,
                    slot_full,
                    schedule_ptr,
                    schedule_width,
                    num_heads_q,
                    seqlen_q,
                    seqlen_k,
                    qk_scale,
                    exp_scale,
                    q_start,
                    q_step,
                    k_start,
                    k_step,
                    align,
                    BLOCK_N,
                    NUM_STAGES,
                    OVERLAP,
                    TURNS,
                    Q_IN_REGISTERS,
                    Q_BUFFERS,
                    OUT_IN_Q,
                    CONDITIONAL_RESCALE,
                    TMA_OUT,
                ),
            ),
            (
                consume,
                (
                    1,
                    q_smem,
                    k_smem,
                    v_smem,
                    out_smem,
                    out_desc,
                    out_ptr,
                    stride_ob,
                    stride_oh,
                    stride_os,
                    lse_ptr,
                    q_full,
                    slot_full,
                    schedule_ptr,
                    schedule_width,
                    num_heads_q,
                    seqlen_q,
                    seqlen_k,
                    qk_scale,
                    exp_scale,
                    q_start,
                    q_step,
                    k_start,
                    k_step,
                    align,
                    BLOCK_N,
                    NUM_STAGES,
                    OVERLAP,
                    TURNS,
                    Q_IN_REGISTERS,
                    Q_BUFFERS,
                    OUT_IN_Q,
                    CONDITIONAL_RESCALE,
                    TMA_OUT,
                ),
            ),
            (
                produce,
                (
                    q_desc,
                    k_desc,
                    q_smem,
                    k_smem,
                    v_desc,
                    v_smem,
                    q_full,
                    slot_full,
                    schedule_ptr,
                    schedule_width,
                    num_heads_q,
                    group_size,
                    seqlen_q,
                    seqlen_k,
                    q_start,
                    q_step,
                    k_start,
                    k_step,
                    align,
                    BLOCK_N,
                    NUM_STAGES,
                    Q_BUFFERS,
                ),
            ),
        ],
        [4, 1],  # warps of all but the first
        [240, 24],  # their registers a thread
    )


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
def attend(
    acc,
    l_i,
    m_i,
    q,
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
    """Online softmax over the key tiles lo .. hi (FlashAttention-2, algorithm 1, the inner loop).

    acc is unnormalised, m_i is the row maximum of s * exp_scale, and l_i the sum of
    exp2(s * exp_scale - m_i). In PARTIAL tiles row i sees the keys 0 .. hi_i only.

    CAREFUL is for what the usual way gets wrong, and m_i is the maximum of s itself there: scores
    so large that the rounding of s * exp_scale shows in P, and NaN or inf in hidden keys, whose
    weight is zero, but zero times NaN is NaN.
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
        qk = tl.dot(q, k.T, input_precision=PRECISION)
        s = score(qk, qk_scale)  # [BLOCK_M, BLOCK_N]
        if PARTIAL:
            columns = tl.arange(0, BLOCK_N)[None, :]
            keep = columns < (hi_i - start_n)[:, None]
            s = tl.where(keep, s, float("-inf"))
        if CAREFUL:
            m_new = tl.maximum(m_i, tl.max(s, 1))
        else:
            m_new = tl.maximum(m_i, tl.max(s, 1) * exp_scale)
        m_safe = m_new
        if PARTIAL:
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that saw no key yet
        if CAREFUL:
            p = tl.exp2((s - m_safe[:, None]) * exp_scale)
            alpha = tl.exp2((m_i - m_safe) * exp_scale)
        else:
            p = tl.exp2(tl.fma(s, exp_scale, -m_safe[:, None]))
            alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
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
        if CAREFUL:
            v, tainted = finite(v)
            sees_tainted = tl.max((keep & tainted[None, :]).to(tl.int32), 1) > 0
            l_i = tl.where(sees_tainted, float("nan"), l_i)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, l_i, m_i


@triton.jit(do_not_specialize=RUN_TIME)
def attn_fwd_again(
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
    out_ptr,
    stride_ob,
    stride_oh,
    stride_os,
    lse_ptr,
    num_heads_q,
    group_size,
    seqlen_q,
    seqlen_k,
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
):
    """Once more, with care, the tiles in which attn_fwd left a NaN in lse. One program looks at
    ROWS rows of one head, and nearly always finds none."""
    num_tiles = tl.cdiv(seqlen_q, ROWS)
    head = tl.program_id(0) // num_tiles
    first_row = tl.program_id(0) % num_tiles * ROWS
    lse_head = lse_ptr + head.to(tl.int64) * seqlen_q
    all_rows = first_row + tl.arange(0, ROWS)
    all_lse = tl.load(lse_head + all_rows, all_rows < seqlen_q, 0.0)
    if tl.max((all_lse != all_lse).to(tl.int32), 0) == 0:
        return
    batch = head // num_heads_q
    head_q = head % num_heads_q
    head_kv = head_q // group_size
    q_head = q_ptr + batch * whole(stride_qb) + head_q * whole(stride_qh)
    stride_qs = whole(stride_qs)
    k_head = k_ptr + batch * whole(stride_kb) + head_kv * whole(stride_kh)
    stride_ks = whole(stride_ks)
    v_head = v_ptr + batch * whole(stride_vb) + head_kv * whole(stride_vh)
    stride_vs = whole(stride_vs)
    out_head = out_ptr + batch * tl.cast(stride_ob, tl.int64)
    out_head += head_q * tl.cast(stride_oh, tl.int64)
    for start_m in range(first_row, tl.minimum(first_row + ROWS, seqlen_q), BLOCK_M):
        rows = start_m + tl.arange(0, BLOCK_M)
        lse = tl.load(lse_head + rows, rows < seqlen_q, 0.0)
        if tl.max((lse != lse).to(tl.int32), 0) > 0:
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
            acc = tl.zeros([BLOCK_M, 128], tl.float32)
            l_i = tl.zeros([BLOCK_M], tl.float32)
            m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
            last_row = tl.minimum(start_m + BLOCK_M, seqlen_q) - 1
            lo, full_lo, full_hi, hi = visible_keys(
                start_m,
                last_row,
                seqlen_k,
                q_start,
                q_step,
                k_start,
                k_step,
                align,
            )
            begin, _, _, end = tile_ranges(lo, full_lo, full_hi, hi, BLOCK_N)
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
            acc, l_i, m_i = attend(
                acc,
                l_i,
                m_i,
                q,
                k_head,
                stride_ks,
                v_head,
                stride_vs,
                start_m,
                begin,
                end,
                hi_i,
                seqlen_k,
                qk_scale,
                exp_scale,
                BLOCK_M,
                BLOCK_N,
                PARTIAL=True,
                CAREFUL=True,
            )
            seen = l_i != 0.0
            total = tl.where(seen, l_i, 1.0)
            lse = tl.where(seen, m_i * exp_scale + tl.log2(total), float("-inf"))
            tl.store(lse_head + rows, lse / LOG2E, rows < seqlen_q)
            norm = tl.where(seen, 1.0 / total, 0.0)[:, None]
            store_rows(
                out_head,
                stride_os,
                start_m,
                seqlen_q,
                acc * norm,
                0,
                BLOCK_M,
                128,
                HEAD_DIM_V,
            )


@functools.lru_cache(maxsize=64)
def schedule(costs, num_heads, heads_per_run, programs, device):
    """The work of each program, head * tiles + tile, as an int32 [programs, width] that ends in -1.

    Heads come in runs whose K and V fit in L2, in a run the costliest tiles first; each goes to
    the program that is free first.
    """
    tiles = sorted(range(len(costs)), key=lambda tile: -costs[tile])
    work = [[] for _ in range(programs)]
    free = [(0, program) for program in range(programs)]
    for first in range(0, num_heads, heads_per_run):
        for tile in tiles:
            for head in range(first, min(first + heads_per_run, num_heads)):
                time, program = free[0]
                work[program].append(head * len(costs) + tile)
                heapq.heapreplace(free, (time + costs[tile], program))
    width = max(map(len, work)) + 1
    rows = [items + [-1] * (width - len(items)) for items in work]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def count_key_tiles(
    first_row,
    last_row,
    seqlen_k,
    q_start,
    q_step,
    k_start,
    k_step,
    align,
    block_n,
):
    """How many key tiles rows first_row .. last_row see: key_tiles(), on the host."""
    lo, hi = 0, seqlen_k
    last = q_start + last_row * q_step + align
    hi = min(max((last - k_start) // k_step + 1, 0), seqlen_k)
    return max(-(-hi // block_n) - lo // block_n, 1)


def described(x, rows, width):
    """x (batch, heads, seqlen, dim) as TMA sees it, by tiles of rows x width of one head."""
    block = [1, 1, rows, width]
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPE)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def plan(
    q,
    k,
    v,
    out,
    lse,
    *,
    softmax_scale,
    q_start=0,
    q_step=1,
    k_start=0,
    k_step=1,
    align=0,
    config=CONFIG,
    config_again=CONFIG_AGAIN,
):
    """The launches of one call, as (kernel, grid, arguments, constants), in order.

    q, k, v and out are (batch, heads, seqlen, dim), the last stride 1. Pointers and other strides
    of q, k and v must be multiples of 16 bytes.
    lse is (batch, heads, seqlen_q), float32, contiguous, natural log. Scales are positive.
    """
    batch, num_heads_q, seqlen_q, _ = q.shape
    num_heads_kv, seqlen_k = k.shape[1:3]
    qk_scale = softmax_scale
    exp_scale = softmax_scale * LOG2E.value
    group_size = num_heads_q // num_heads_kv
    block_m, block_n = 64 * CONSUMERS.value, config["BLOCK_N"]
    starts = range(0, seqlen_q, block_m)
    costs = tuple(
        1
        + count_key_tiles(
            start_m,
            min(start_m + block_m, seqlen_q) - 1,
            seqlen_k,
            q_start,
            q_step,
            k_start,
            k_step,
            align,
            block_n,
        )
        for start_m in starts
    )
    kv_bytes = seqlen_k * (HEAD_DIM.value + HEAD_DIM_V.value) * q.element_size()
    heads_per_run = max(1, (16 << 20) // kv_bytes) * group_size
    num_heads = batch * num_heads_q
    programs = 1  # on an emulator
    if q.is_cuda:
        programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    programs = min(programs, len(starts) * num_heads)
    work = schedule(costs, num_heads, heads_per_run, programs, q.device)
    # TMA takes a tile of the inputs' type, and strides of whole 16 bytes.
    tma_out = out.dtype == q.dtype
    tma_out &= all(stride * out.element_size() % 16 == 0 for stride in out.stride()[:3])
    numbers = (
        seqlen_q,
        seqlen_k,
        qk_scale,
        exp_scale,
        q_start,
        q_step,
        k_start,
        k_step,
        align,
    )
    arguments = (
        described(q, 64, 128),
        described(k, block_n, 128),
        described(v, block_n, 128),
        described(out if tma_out else v, 64, 128),
        out,
        *out.stride()[:3],
        lse,
        work,
        work.shape[1],
        num_heads_q,
        group_size,
        *numbers,
    )
    again = (
        q,
        *q.stride()[:3],
        k,
        *k.stride()[:3],
        v,
        *v.stride()[:3],
        out,
        *out.stride()[:3],
        lse,
        num_heads_q,
        group_size,
        *numbers,
    )
    again_grid = (-(-seqlen_q // config_again["ROWS"]) * num_heads, 1, 1)
    return [
        (attn_fwd, (programs, 1, 1), arguments, {**config, "TMA_OUT": tma_out}),
        (attn_fwd_again, again_grid, again, config_again),
    ]


def launch(*tensors, **numbers):
    """Run the kernels; takes what plan() takes and writes out and lse."""
    for kernel, grid, arguments, constants in plan(*tensors, **numbers):
        kernel[grid](*arguments, **constants)


def reference(q, k, v, *, softmax_scale, softcap=None, window_left=None, window_right=None):
    """The same in plain PyTorch, float32: out and lse."""
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
    out = torch.empty_like(v)
    lse = torch.empty(q.shape[:3], device=q.device)
    launch(q, k, v, out, lse, **numbers, **dropout)
    want, want_lse = reference(q, k, v, **numbers)
    error = ((out.float() - want).norm() / want.norm()).item()
    lse_error = (lse - want_lse).abs().max().item()
    print(f"out: relative error {error:.1e}; lse: largest error {lse_error:.1e}")
    assert error < 1e-2 and lse_error < 1e-2, "does not agree with PyTorch"
    if q.is_cuda:
        ms = triton.testing.do_bench(lambda: launch(q, k, v, out, lse, **numbers, **dropout))
        print(f"{ms:.3f} ms for q of shape {tuple(q.shape)}")


if __name__ == "__main__":
    main()
