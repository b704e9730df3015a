"""Attention backward: bfloat16, head_dim 128, causal, packed, tiles by pointer.

Emitted by attngen 0.1. Stands alone (torch and triton only): read, edit and run it.
  spec    head_dim=128,dtype=bfloat16,causal=true,layout=thd
  config  lowering=triton,tiles=pointer,dq=kernel,block_m=64,block_n=64,num_warps=4,num_stages=2,
          dq_block_m=64,dq_block_n=64,dq_num_warps=4,dq_num_stages=2
  again   attngen emit SPEC --direction bwd --config CONFIG, with SPEC and CONFIG as above
softmax_scale, softcap, dropout_p, window sizes, lengths and strides are arguments of launch().
"""

import torch
import triton
import triton.language as tl

HEAD_DIM = tl.constexpr(128)
HEAD_DIM_V = tl.constexpr(128)
UNIT = tl.constexpr(8)  # elements in 16 bytes
FAN = tl.constexpr(128)  # sequences that a step of the search for a tile's own looks at
LOG2E = tl.constexpr(1.4426950408889634)
PRECISION = tl.constexpr("ieee")  # of float32 products; 16-bit ones ignore it
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
    "batch_start",
    "head_start",
    "threshold",
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
    "BLOCK_N": 64,
    "num_warps": 4,
    "num_stages": 2,
}
CONFIG_DQ = {
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "num_warps": 4,
    "num_stages": 2,
}


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
    each sequence's, so that the grid needs no lengths; some numbers have no tile. A step of the
    search looks at FAN sequences.
    """
    sequence = -1
    span = num_seqs + 2
    while span > 1:
        step = tl.cdiv(span, FAN)
        n = sequence + step * (tl.arange(0, FAN) + 1)
        first = offset_of(cu_seqlens_ptr, n, num_seqs, total) // BLOCK + n + 1
        sequence += step * tl.sum(((n <= num_seqs) & (first <= at)).to(tl.int32), 0)
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
        128,
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
    to = head.to(tl.int64) * 2 * padded_q + rows
    tl.store(rows_ptr + to, tl.where(lost, float("-inf"), -lse))
    tl.store(rows_ptr + to + padded_q, tl.where(lost, 0.0, delta))


@triton.jit
def walk_queries(
    dk,
    dv,
    k,
    v,
    q_head,
    stride_qs,
    do_head,
    stride_dos,
    rows_head,
    padded_q,
    start_n,
    lo,
    hi,
    lo_j,
    seqlen_q,
    qk_scale,
    exp_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Add what the query tiles lo .. hi give to dk and dv of one key tile.

    Tiles are transposed, keys first (FlashAttention-2, algorithm 2, the inner loop); P is
    recomputed from lse. In PARTIAL tiles key j is seen by the queries
    lo_j .. seqlen_q only.
    """
    for start_m in tl.range(lo, hi, BLOCK_M):
        rows_q = start_m + tl.arange(0, BLOCK_M)
        q = load_rows(
            q_head,
            stride_qs,
            start_m,
            seqlen_q,
            0,
            BLOCK_M,
            128,
            HEAD_DIM,
            PARTIAL,
        )  # [BLOCK_M, 128]
        if PARTIAL:  # rows past the end are another sequence's
            minus_lse = tl.load(rows_head + rows_q, rows_q < seqlen_q, float("-inf"))
            delta = tl.load(rows_head + padded_q + rows_q, rows_q < seqlen_q, 0.0)
        else:
            minus_lse = tl.load(rows_head + rows_q)
            delta = tl.load(rows_head + padded_q + rows_q)
        qk = tl.dot(k, q.T, input_precision=PRECISION)
        s = score(qk, qk_scale)  # [BLOCK_N, BLOCK_M]
        p = probability(s, exp_scale, minus_lse[None, :])
        do = load_rows(
            do_head,
            stride_dos,
            start_m,
            seqlen_q,
            0,
            BLOCK_M,
            128,
            HEAD_DIM_V,
            PARTIAL,
        )  # [BLOCK_M, 128]
        do = do.to(v.dtype)
        dp = tl.dot(v, do.T, input_precision=PRECISION)
        if PARTIAL:
            columns = tl.arange(0, BLOCK_M)[None, :]
            keep = columns >= (lo_j - start_m)[:, None]
            p = tl.where(keep, p, 0.0)
        p_kept = p.to(do.dtype)
        dv = tl.dot(p_kept, do, dv, input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        if PARTIAL:
            ds = tl.where(keep, ds, 0.0)
        ds = ds.to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=RUN_TIME)
def attn_bwd_dkdv(
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
    dk_ptr,
    stride_dkb,
    stride_dkh,
    stride_dks,
    dv_ptr,
    stride_dvb,
    stride_dvh,
    stride_dvs,
    rows_ptr,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_USED_Q: tl.constexpr,
    HAS_USED_K: tl.constexpr,
):
    """One program: dk and dv of BLOCK_N keys, summed in float32 over the query heads that share
    them."""
    num_tiles = total_k // BLOCK_N + num_seqs + 2
    tile, head_shared = locate(tl.program_id(0), num_tiles, num_heads, heads_per_run)
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
    head_kv = head_shared % num_heads_kv
    start_n = tile * BLOCK_N
    seqlen_q = tl.where(start_n < seqlen_k, seqlen_q, 0)  # no query sees keys that are not used
    stride_ks = whole(stride_ks)
    k_head = k_ptr + begin_k * stride_ks
    k_head += head_kv * whole(stride_kh)
    stride_vs = whole(stride_vs)
    v_head = v_ptr + begin_k * stride_vs
    v_head += head_kv * whole(stride_vh)
    stride_qs = whole(stride_qs)
    stride_dos = whole(stride_dos)
    k = load_rows(
        k_head,
        stride_ks,
        start_n,
        seqlen_k,
        0,
        BLOCK_N,
        128,
        HEAD_DIM,
        True,
    )  # [BLOCK_N, 128]
    dk = tl.zeros([BLOCK_N, 128], tl.float32)
    v = load_rows(
        v_head,
        stride_vs,
        start_n,
        seqlen_k,
        0,
        BLOCK_N,
        128,
        HEAD_DIM_V,
        True,
    )  # [BLOCK_N, 128]
    dv = tl.zeros([BLOCK_N, 128], tl.float32)
    last_row = tl.minimum(start_n + BLOCK_N, seqlen_k) - 1
    last_row = tl.maximum(last_row, start_n)  # in a tile of which no key is used
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
    rows = start_n + tl.arange(0, BLOCK_N)
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
    lo_j = tl.where(lo_j < seqlen_q, lo_j, seqlen_q + BLOCK_M)

    for member in range(group_size):
        head_q = head_kv * group_size + member
        head = head_q
        rows_head = rows_ptr + head.to(tl.int64) * 2 * padded_q + begin_q
        q_head = q_ptr + begin_q * stride_qs + head_q * whole(stride_qh)
        do_head = do_ptr + begin_q * stride_dos + head_q * whole(stride_doh)
        dk, dv = walk_queries(
            dk,
            dv,
            k,
            v,
            q_head,
            stride_qs,
            do_head,
            stride_dos,
            rows_head,
            padded_q,
            start_n,
            begin,
            end,
            lo_j,
            seqlen_q,
            qk_scale,
            exp_scale,
            BLOCK_M,
            BLOCK_N,
            PARTIAL=True,
        )

    used = (start_n + tl.arange(0, BLOCK_N) < seqlen_k)[:, None]
    dk_head = dk_ptr + begin_k * tl.cast(stride_dks, tl.int64)
    dk_head += head_kv * tl.cast(stride_dkh, tl.int64)
    store_rows(
        dk_head,
        stride_dks,
        start_n,
        owned_k,
        tl.where(used, dk * softmax_scale, 0.0),
        0,
        BLOCK_N,
        128,
        HEAD_DIM,
    )
    dv_head = dv_ptr + begin_k * tl.cast(stride_dvs, tl.int64)
    dv_head += head_kv * tl.cast(stride_dvh, tl.int64)
    store_rows(
        dv_head,
        stride_dvs,
        start_n,
        owned_k,
        tl.where(used, dv, 0.0),
        0,
        BLOCK_N,
        128,
        HEAD_DIM_V,
    )


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
def attn_bwd_dq(
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
    dq_ptr,
    stride_dqb,
    stride_dqh,
    stride_dqs,
    rows_ptr,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_USED_Q: tl.constexpr,
    HAS_USED_K: tl.constexpr,
):
    """One program: dq of BLOCK_M query rows of one head."""
    num_tiles = total_q // BLOCK_M + num_seqs + 2
    tile, head = locate(tl.program_id(0), num_tiles, num_heads, heads_per_run)
    tile = num_tiles - 1 - tile  # the longest rows first
    sequence, tile = find_tile(tile, cu_seqlens_q_ptr, num_seqs, total_q, BLOCK_M)
    begin_q, owned_q, seqlen_q = rows_of(
        sequence,
        cu_seqlens_q_ptr,
        seqused_q_ptr,
        num_seqs,
        total_q,
        HAS_USED_Q,
    )
    if (tile < 0) | (tile >= tl.cdiv(owned_q, BLOCK_M)):
        return
    begin_k, _, seqlen_k = rows_of(
        sequence,
        cu_seqlens_k_ptr,
        seqused_k_ptr,
        num_seqs,
        total_k,
        HAS_USED_K,
    )
    align *= seqlen_k - seqlen_q
    head_q = head % num_heads_q
    head_kv = head_q // group_size
    start_m = tile * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    seqlen_k = tl.where(start_m < seqlen_q, seqlen_k, 0)  # rows that are not used see no key
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
    do = do.to(q.dtype)
    rows_head = rows_ptr + head.to(tl.int64) * 2 * padded_q + begin_q
    minus_lse = tl.load(rows_head + rows, rows < seqlen_q, float("-inf"))
    delta = tl.load(rows_head + padded_q + rows, rows < seqlen_q, 0.0)

    last_row = tl.minimum(start_m + BLOCK_M, seqlen_q) - 1
    last_row = tl.maximum(last_row, start_m)  # in a tile of which no row is used
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
    begin, full_begin, full_end, end = tile_ranges(lo, full_lo, full_hi, hi, BLOCK_N)
    rows = start_m + tl.arange(0, BLOCK_M)
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
        full_begin,
        full_end,
        hi_i,
        seqlen_k,
        qk_scale,
        exp_scale,
        BLOCK_M,
        BLOCK_N,
        PARTIAL=False,
        CAREFUL=False,
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
        full_end,
        end,
        hi_i,
        seqlen_k,
        qk_scale,
        exp_scale,
        BLOCK_M,
        BLOCK_N,
        PARTIAL=True,
        CAREFUL=False,
    )
    row_sums = tl.sum(dq, 1)
    if tl.max((row_sums != row_sums).to(tl.int32), 0) > 0:  # rare: once more, with care
        dq = tl.zeros([BLOCK_M, 128], tl.float32)
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
            0,
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

    used = (rows < seqlen_q)[:, None]
    dq_head = dq_ptr + begin_q * tl.cast(stride_dqs, tl.int64)
    dq_head += head_q * tl.cast(stride_dqh, tl.int64)
    store_rows(
        dq_head,
        stride_dqs,
        start_m,
        owned_q,
        tl.where(used, dq * softmax_scale, 0.0),
        0,
        BLOCK_M,
        128,
        HEAD_DIM,
    )


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
    config_dq=CONFIG_DQ,
):
    """The launches of one call, as (kernel, grid, arguments, constants), in order.

    q, k, v, out, do, dq, dk, dv are (batch, heads, seqlen, dim), the last stride 1. Pointers and
    other strides of q, k, v and do must be multiples of 16 bytes.
    lse and dlse (or None) are (batch, heads, seqlen_q), float32, contiguous. rows is scratch:
    (batch, heads, 2, padded seqlen_q), float32, contiguous, padded to a multiple of 128.
    batch is 1, and rows of all sequences follow one another; num_seqs of them begin at cu_seqlens,
    int32 (num_seqs + 1), on the device. seqused, int32 (num_seqs), if given, says how many rows of
    each are used. Other rows of out are 0.
    align 1 aligns the last query of each sequence with its last key, 0 the first ones.
    """
    batch, num_heads_q, seqlen_q, _ = q.shape
    num_heads_kv, seqlen_k = k.shape[1:3]
    num_seqs = cu_seqlens_q.shape[0] - 1
    qk_scale = softmax_scale
    exp_scale = softmax_scale * LOG2E.value
    row_bytes = (HEAD_DIM.value + HEAD_DIM_V.value) * q.element_size()
    heads_per_run = max(1, (16 << 20) // (seqlen_q * row_bytes))
    group_size = num_heads_q // num_heads_kv
    q_heads_per_run = max(1, (16 << 20) // (seqlen_k * row_bytes)) * group_size
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
    dkdv = (
        q,
        *q.stride()[:3],
        k,
        *k.stride()[:3],
        v,
        *v.stride()[:3],
        do,
        *do.stride()[:3],
        dk,
        *dk.stride()[:3],
        dv,
        *dv.stride()[:3],
        rows,
        padded_q,
        num_heads_q,
        batch * num_heads_kv,
        num_heads_q // num_heads_kv,
        heads_per_run,
        *numbers,
    )
    queries = (
        q,
        *q.stride()[:3],
        k,
        *k.stride()[:3],
        v,
        *v.stride()[:3],
        do,
        *do.stride()[:3],
        dq,
        *dq.stride()[:3],
        rows,
        padded_q,
        num_heads_q,
        batch * num_heads_q,
        num_heads_q // num_heads_kv,
        q_heads_per_run,
        *numbers,
    )
    grid_n = (seqlen_k // config_dkdv["BLOCK_N"] + num_seqs + 2) * num_heads_kv
    grid_m = (seqlen_q // config_dq["BLOCK_M"] + num_seqs + 2) * num_heads_q
    used = {"HAS_USED_Q": seqused_q is not None, "HAS_USED_K": seqused_k is not None}
    config_dkdv = {**config_dkdv, **used}
    config_dq = {**config_dq, **used}
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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads, seqlen = (16, 4096) if device == "cuda" else (2, 100)
    # Triton's interpreter, which TRITON_INTERPRET=1 runs on a CPU, cannot multiply bfloat16.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

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
    (q, k, v), numbers, dropout = example()
    if not q.is_cuda and not triton.knobs.runtime.interpret:
        raise SystemExit("no GPU here: run it again with TRITON_INTERPRET=1, in the interpreter")
    if not q.is_cuda:
        print("no GPU here: checked with float32 data, not bfloat16")
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
