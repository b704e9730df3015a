"""Attention backward: bfloat16, head_dim 128, causal, documents, tiles by pointer.

Emitted by attngen 0.1. Stands alone (torch and triton only): read, edit and run it.
  spec    head_dim=128,dtype=bfloat16,causal=true,documents=true
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
    "q_start",
    "q_step",
    "k_start",
    "k_step",
    "align",
    "window_left",
    "window_right",
    "stride_doc_q",
    "stride_doc_k",
    "num_doc_tiles",
    "num_tiles",
    "num_others",
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


@triton.jit
def store_bounds(ids_head, start, seqlen, at, step, COUNT: tl.constexpr):
    """The least and the largest id of rows start .. start + COUNT, at `at` and `step` further."""
    rows = tl.minimum(start + tl.arange(0, COUNT), seqlen - 1)
    ids = tl.load(ids_head + rows).to(tl.int64)
    tl.store(at, tl.min(ids, 0))
    tl.store(at + step, tl.max(ids, 0))


@triton.jit(do_not_specialize=RUN_TIME)
def document_bounds(
    doc_q_ptr,
    stride_doc_q,
    doc_k_ptr,
    stride_doc_k,
    doc_tiles_ptr,
    num_doc_tiles,
    seqlen_q,
    seqlen_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: the least and the largest document id of a tile of queries or of keys."""
    tiles_q = tl.cdiv(seqlen_q, BLOCK_M)
    tiles = tiles_q + tl.cdiv(seqlen_k, BLOCK_N)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    at = doc_tiles_ptr + batch * 8 * num_doc_tiles
    if tile < tiles_q:
        ids = doc_q_ptr + batch * stride_doc_q
        store_bounds(ids, tile * BLOCK_M, seqlen_q, at + tile, num_doc_tiles, BLOCK_M)
    else:
        tile -= tiles_q
        ids = doc_k_ptr + batch * stride_doc_k
        at += 2 * num_doc_tiles + tile
        store_bounds(ids, tile * BLOCK_N, seqlen_k, at, num_doc_tiles, BLOCK_N)


@triton.jit(do_not_specialize=RUN_TIME)
def document_ranges(
    doc_tiles_ptr,
    num_doc_tiles,
    num_tiles,
    num_others,
    FIRST: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    """One program: which tiles of BLOCK rows of the other side may share a document with one tile.

    Bounds of the tile's side begin at row FIRST of doc_tiles, of the other side at row OTHERS. Rows
    4 to 7 get begin, full_begin, full_end and end, in rows of the other side: no tile outside
    begin .. end shares an id, and full_begin .. full_end holds one id alone, as the tile does.
    """
    tile = tl.program_id(0) % num_tiles
    batch = (tl.program_id(0) // num_tiles).to(tl.int64)
    bounds = doc_tiles_ptr + batch * 8 * num_doc_tiles
    least = tl.load(bounds + FIRST * num_doc_tiles + tile)
    largest = tl.load(bounds + (FIRST + 1) * num_doc_tiles + tile)
    begin, end, full_begin, full_end, num_full = num_others, 0, num_others, 0, 0
    for start in range(0, num_others, COUNT):
        others = start + tl.arange(0, COUNT)
        inside = others < num_others
        low = tl.load(bounds + OTHERS * num_doc_tiles + others, inside, 0)
        high = tl.load(bounds + (OTHERS + 1) * num_doc_tiles + others, inside, 0)
        meets = inside & (low <= largest) & (high >= least)
        begin = tl.minimum(begin, tl.min(tl.where(meets, others, num_others), 0))
        end = tl.maximum(end, tl.max(tl.where(meets, others + 1, 0), 0))
        full = meets & (low == high) & (least == largest)
        full_begin = tl.minimum(full_begin, tl.min(tl.where(full, others, num_others), 0))
        full_end = tl.maximum(full_end, tl.max(tl.where(full, others + 1, 0), 0))
        num_full += tl.sum(full.to(tl.int32), 0)
    begin = tl.minimum(begin, end)
    # Ids that are not sorted may leave gaps: then every tile is compared id by id.
    has_full = (num_full > 0) & (full_end - full_begin == num_full)
    at = bounds + 4 * num_doc_tiles + tile
    tl.store(at, begin * BLOCK)
    tl.store(at + num_doc_tiles, tl.where(has_full, full_begin, end) * BLOCK)
    tl.store(at + 2 * num_doc_tiles, tl.where(has_full, full_end, end) * BLOCK)
    tl.store(at + 3 * num_doc_tiles, end * BLOCK)


@triton.jit
def in_documents(begin, full_begin, full_end, end, doc_tiles_ptr, num_doc_tiles, batch, tile):
    """Ranges of tiles, cut to those that may share a document with one tile."""
    at = doc_tiles_ptr + (batch.to(tl.int64) * 8 + 4) * num_doc_tiles + tile
    begin = tl.maximum(begin, tl.load(at).to(tl.int32))
    end = tl.maximum(begin, tl.minimum(end, tl.load(at + 3 * num_doc_tiles).to(tl.int32)))
    full_begin = tl.maximum(full_begin, tl.load(at + num_doc_tiles).to(tl.int32))
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(full_end, tl.load(at + 2 * num_doc_tiles).to(tl.int32))
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def load_ids(ids_head, start, seqlen, COUNT: tl.constexpr):
    """The document ids of rows start .. start + COUNT, and which of these rows there are."""
    rows = start + tl.arange(0, COUNT)
    return tl.load(ids_head + rows, rows < seqlen, 0), rows < seqlen


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
    ids,
    doc_q_head,
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
            others, are_there = load_ids(doc_q_head, start_m, seqlen_q, BLOCK_M)
            keep &= (ids[:, None] == others[None, :]) & are_there[None, :]
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
    seqlen_q,
    seqlen_k,
    softmax_scale,
    qk_scale,
    exp_scale,
    doc_q_ptr,
    stride_doc_q,
    doc_k_ptr,
    stride_doc_k,
    doc_tiles_ptr,
    num_doc_tiles,
    q_start,
    q_step,
    k_start,
    k_step,
    align,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: dk and dv of BLOCK_N keys, summed in float32 over the query heads that share
    them."""
    num_tiles = tl.cdiv(seqlen_k, BLOCK_N)
    tile, head_shared = locate(tl.program_id(0), num_tiles, num_heads, heads_per_run)
    num_heads_kv = num_heads_q // group_size
    batch = head_shared // num_heads_kv
    head_kv = head_shared % num_heads_kv
    start_n = tile * BLOCK_N
    k_head = k_ptr + batch * whole(stride_kb) + head_kv * whole(stride_kh)
    stride_ks = whole(stride_ks)
    v_head = v_ptr + batch * whole(stride_vb) + head_kv * whole(stride_vh)
    stride_vs = whole(stride_vs)
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
    doc_q_head = doc_q_ptr + batch * tl.cast(stride_doc_q, tl.int64)
    doc_k_head = doc_k_ptr + batch * tl.cast(stride_doc_k, tl.int64)
    ids, _ = load_ids(doc_k_head, start_n, seqlen_k, BLOCK_N)
    last_row = tl.minimum(start_n + BLOCK_N, seqlen_k) - 1
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
    begin, full_begin, full_end, end = in_documents(
        begin,
        full_begin,
        full_end,
        end,
        doc_tiles_ptr,
        num_doc_tiles,
        batch,
        tile,
    )

    for member in range(group_size):
        head_q = head_kv * group_size + member
        head = batch * num_heads_q + head_q
        rows_head = rows_ptr + head.to(tl.int64) * 2 * padded_q
        q_head = q_ptr + batch * whole(stride_qb) + head_q * whole(stride_qh)
        do_head = do_ptr + batch * whole(stride_dob) + head_q * whole(stride_doh)
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
            full_begin,
            lo_j,
            seqlen_q,
            qk_scale,
            exp_scale,
            ids,
            doc_q_head,
            BLOCK_M,
            BLOCK_N,
            PARTIAL=True,
        )
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
            full_begin,
            full_end,
            lo_j,
            seqlen_q,
            qk_scale,
            exp_scale,
            ids,
            doc_q_head,
            BLOCK_M,
            BLOCK_N,
            PARTIAL=False,
        )
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
            full_end,
            end,
            lo_j,
            seqlen_q,
            qk_scale,
            exp_scale,
            ids,
            doc_q_head,
            BLOCK_M,
            BLOCK_N,
            PARTIAL=True,
        )

    dk_head = dk_ptr + batch * tl.cast(stride_dkb, tl.int64)
    dk_head += head_kv * tl.cast(stride_dkh, tl.int64)
    store_rows(
        dk_head,
        stride_dks,
        start_n,
        seqlen_k,
        dk * softmax_scale,
        0,
        BLOCK_N,
        128,
        HEAD_DIM,
    )
    dv_head = dv_ptr + batch * tl.cast(stride_dvb, tl.int64)
    dv_head += head_kv * tl.cast(stride_dvh, tl.int64)
    store_rows(
        dv_head,
        stride_dvs,
        start_n,
        seqlen_k,
        dv,
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
    ids,
    doc_k_head,
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
            others, _ = load_ids(doc_k_head, start_n, seqlen_k, BLOCK_N)
            keep &= ids[:, None] == others[None, :]
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
    seqlen_q,
    seqlen_k,
    softmax_scale,
    qk_scale,
    exp_scale,
    doc_q_ptr,
    stride_doc_q,
    doc_k_ptr,
    stride_doc_k,
    doc_tiles_ptr,
    num_doc_tiles,
    q_start,
    q_step,
    k_start,
    k_step,
    align,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: dq of BLOCK_M query rows of one head."""
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, head = locate(tl.program_id(0), num_tiles, num_heads, heads_per_run)
    tile = num_tiles - 1 - tile  # the longest rows first
    batch = head // num_heads_q
    head_q = head % num_heads_q
    head_kv = head_q // group_size
    start_m = tile * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    q_head = q_ptr + batch * whole(stride_qb) + head_q * whole(stride_qh)
    stride_qs = whole(stride_qs)
    k_head = k_ptr + batch * whole(stride_kb) + head_kv * whole(stride_kh)
    stride_ks = whole(stride_ks)
    v_head = v_ptr + batch * whole(stride_vb) + head_kv * whole(stride_vh)
    stride_vs = whole(stride_vs)
    do_head = do_ptr + batch * whole(stride_dob) + head_q * whole(stride_doh)
    stride_dos = whole(stride_dos)
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
    rows_head = rows_ptr + head.to(tl.int64) * 2 * padded_q
    minus_lse = tl.load(rows_head + rows)
    delta = tl.load(rows_head + padded_q + rows)

    doc_q_head = doc_q_ptr + batch * tl.cast(stride_doc_q, tl.int64)
    doc_k_head = doc_k_ptr + batch * tl.cast(stride_doc_k, tl.int64)
    ids, _ = load_ids(doc_q_head, start_m, seqlen_q, BLOCK_M)
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
    begin, full_begin, full_end, end = in_documents(
        begin,
        full_begin,
        full_end,
        end,
        doc_tiles_ptr,
        num_doc_tiles,
        batch,
        tile,
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
        begin,
        full_begin,
        hi_i,
        seqlen_k,
        qk_scale,
        exp_scale,
        ids,
        doc_k_head,
        BLOCK_M,
        BLOCK_N,
        PARTIAL=True,
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
        full_begin,
        full_end,
        hi_i,
        seqlen_k,
        qk_scale,
        exp_scale,
        ids,
        doc_k_head,
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
        ids,
        doc_k_head,
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
            begin,
            end,
            hi_i,
            seqlen_k,
            qk_scale,
            exp_scale,
            ids,
            doc_k_head,
            BLOCK_M,
            BLOCK_N,
            PARTIAL=True,
            CAREFUL=True,
        )

    dq_head = dq_ptr + batch * tl.cast(stride_dqb, tl.int64)
    dq_head += head_q * tl.cast(stride_dqh, tl.int64)
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


def document_launches(doc_ids_q, doc_ids_k, doc_tiles, blocks, walks_keys=True):
    """The launches that fill doc_tiles for a kernel of such blocks, which walks keys, or else
    queries."""
    batch, seqlen_q = doc_ids_q.shape
    seqlen_k = doc_ids_k.shape[1]
    blocks = {name: blocks[name] for name in ("BLOCK_M", "BLOCK_N")}
    tiles_q, tiles_k = -(-seqlen_q // blocks["BLOCK_M"]), -(-seqlen_k // blocks["BLOCK_N"])
    bounds = (
        doc_ids_q,
        doc_ids_q.stride(0),
        doc_ids_k,
        doc_ids_k.stride(0),
        doc_tiles,
        doc_tiles.shape[2],
        seqlen_q,
        seqlen_k,
    )
    if walks_keys:
        sizes = (tiles_q, tiles_k)
        sides = {"FIRST": 0, "OTHERS": 2, "BLOCK": blocks["BLOCK_N"], "COUNT": 256}
    else:
        sizes = (tiles_k, tiles_q)
        sides = {"FIRST": 2, "OTHERS": 0, "BLOCK": blocks["BLOCK_M"], "COUNT": 256}
    ranges = (doc_tiles, doc_tiles.shape[2], *sizes)
    return [
        (document_bounds, (batch * (tiles_q + tiles_k), 1, 1), bounds, blocks),
        (document_ranges, (batch * sizes[0], 1, 1), ranges, sides),
    ]


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
    doc_tiles,
    *,
    softmax_scale,
    doc_ids_q,
    doc_ids_k,
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
    doc_ids_q is (batch, seqlen_q), doc_ids_k (batch, seqlen_k), int32 or int64, the last stride 1.
    doc_tiles is scratch: (batch, 8, a sixteenth of the longer length, up), int64, contiguous.
    """
    batch, num_heads_q, seqlen_q, _ = q.shape
    num_heads_kv, seqlen_k = k.shape[1:3]
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
        softmax_scale,
        qk_scale,
        exp_scale,
        doc_ids_q,
        doc_ids_q.stride(0),
        doc_ids_k,
        doc_ids_k.stride(0),
        doc_tiles,
        doc_tiles.shape[2],
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
    grid_n = -(-seqlen_k // config_dkdv["BLOCK_N"]) * batch * num_heads_kv
    grid_m = -(-seqlen_q // config_dq["BLOCK_M"]) * batch * num_heads_q
    first = {"BLOCK_M": 64, "HAS_DLSE": dlse is not None}
    return [
        (attn_bwd_preprocess, (tiles, 1, 1), preprocess, first),
        *document_launches(doc_ids_q, doc_ids_k, doc_tiles, config_dkdv, walks_keys=False),
        (attn_bwd_dkdv, (grid_n, 1, 1), dkdv, config_dkdv),
        *document_launches(doc_ids_q, doc_ids_k, doc_tiles, config_dq),
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
    softmax_scale,
    softcap=None,
    window_left=None,
    window_right=None,
    doc_ids_q,
    doc_ids_k,
):
    """The same in plain PyTorch, float32: out and lse."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.float(), *(x.float().repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(2, 3) * softmax_scale
    rows_q = torch.arange(q.shape[2], device=q.device)[:, None]
    ahead = torch.arange(k.shape[2], device=q.device)[None, :] - rows_q
    others = doc_ids_q[:, None, :, None] != doc_ids_k[:, None, None, :]
    s = s.masked_fill(others, float("-inf"))
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

    numbers = {
        "softmax_scale": HEAD_DIM.value**-0.5,
    }
    ids = torch.arange(seqlen, device=device)[None] * 3 // seqlen  # three documents
    numbers |= {"doc_ids_q": ids, "doc_ids_k": ids}
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
    sixteenths = triton.cdiv(max(q.shape[2], k.shape[2]), 16)
    scratch.append(torch.empty(q.shape[0], 8, sixteenths, dtype=torch.int64, device=q.device))
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
