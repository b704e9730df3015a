"""Attention backward: bfloat16, head_dim 128, tree, tiles by pointer.

Emitted by attngen 0.1. Stands alone (torch and triton only): read, edit and run it.
  spec    head_dim=128,dtype=bfloat16,tree_mask=true
  config  lowering=triton,tiles=pointer,dq=atomic,block_m=64,block_n=128,num_warps=8,num_stages=2
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
    "stride_trb",
    "stride_trm",
    "tree_size",
    "tree_start",
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
LARGEST = tl.constexpr(3.3895313892515355e38)

CONFIG_DKDV = {
    "BLOCK_M": 64,
    "BLOCK_N": 128,
    "num_warps": 8,
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
    tree_start,
):
    """Queries that see key rows first_row .. last_row: lo .. hi some, full_lo .. full_hi all."""
    last = k_start + last_row * k_step - align
    lo = 0
    full_lo = 0
    # Which nodes see a node, the tree says: no tile of its keys is full.
    full_lo = tl.where(last >= tree_start - align, seqlen_q, full_lo)
    hi = seqlen_q
    full_hi = seqlen_q
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
def add_rows(
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
    """Add a [COUNT, WIDTH] float32 tile to rows start .. below `limit`, atomically per element."""
    rows = tl.arange(0, COUNT)
    columns = FIRST + tl.arange(0, WIDTH)
    stride = tl.cast(stride, tl.int64)
    ptrs = head_ptr + start * stride + (rows[:, None] * stride + columns[None, :])
    inside = (start + rows < limit)[:, None] & (columns < DIM)[None, :]
    tl.atomic_add(ptrs, value, inside, sem="relaxed")


@triton.jit
def bounded(x):
    """x with NaN and inf made finite.

    A hidden key's dS is zero, but zero times NaN is NaN. Where the key is seen, nothing is lost: a
    NaN in it has made lse NaN.
    """
    wide = x.to(tl.float32)
    return tl.minimum(tl.maximum(wide, -LARGEST), LARGEST).to(x.dtype)


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
def in_tree(nodes_q, nodes_k, tree_head, stride_m, stride_n, tree_size):
    """May queries see keys, as far as the tree says? Rows before the tree have negative nodes."""
    nodes = (nodes_q >= 0) & (nodes_k >= 0)
    inside = nodes & (nodes_q < tree_size) & (nodes_k < tree_size)
    ptrs = tree_head + nodes_q * tl.cast(stride_m, tl.int64)
    ptrs += nodes_k * tl.cast(stride_n, tl.int64)
    return (nodes ^ True) | (tl.load(ptrs, inside, 0) != 0)


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
    dq_sum, which attn_bwd_dkdv adds to, is set to zero.
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
    store_rows(
        dq_sum_ptr + head.to(tl.int64) * seqlen_q * HEAD_DIM,
        HEAD_DIM,
        start_m,
        seqlen_q,
        tl.zeros([BLOCK_M, 128], tl.float32),
        0,
        BLOCK_M,
        128,
        HEAD_DIM,
    )


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
    dq_sum_ptr,
    head,
    rows_head,
    padded_q,
    start_n,
    lo,
    hi,
    lo_j,
    seqlen_q,
    qk_scale,
    exp_scale,
    tree_head,
    stride_trm,
    stride_trn,
    tree_size,
    nodes,
    first_node,
    node_step,
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
            across = first_node + (start_m + tl.arange(0, BLOCK_M)) * node_step
            seen = in_tree(
                across[None, :],
                nodes[:, None],
                tree_head,
                stride_trm,
                stride_trn,
                tree_size,
            )
            keep &= seen
            p = tl.where(keep, p, 0.0)
        p_kept = p.to(do.dtype)
        dv = tl.dot(p_kept, do, dv, input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        if PARTIAL:
            ds = tl.where(keep, ds, 0.0)
        ds = ds.to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        dq = tl.dot(ds.T, k, input_precision=PRECISION)
        add_rows(
            dq_sum_ptr + head.to(tl.int64) * seqlen_q * HEAD_DIM,
            HEAD_DIM,
            start_m,
            seqlen_q,
            dq,
            0,
            BLOCK_M,
            128,
            HEAD_DIM,
        )
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
    dq_sum_ptr,
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
    tree_ptr,
    stride_trb,
    stride_trm,
    stride_trn,
    tree_size,
    tree_start,
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
    k = bounded(k)
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
    tree_head = tree_ptr + batch * tl.cast(stride_trb, tl.int64)
    nodes = k_start + (start_n + tl.arange(0, BLOCK_N)) * k_step - tree_start
    first_node, node_step = q_start + align - tree_start, q_step
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
        tree_start,
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
        tree_start,
    )
    # A key that no query sees is hidden from the rows past the end too: it may hold NaN.
    lo_j = tl.where(lo_j < seqlen_q, lo_j, seqlen_q + BLOCK_M)
    # No query sees keys past the end: all tiles of the last keys are partial.
    lo_j = tl.where(rows < seqlen_k, lo_j, seqlen_q)
    full_begin = tl.where(start_n + BLOCK_N > seqlen_k, end, full_begin)
    full_end = tl.maximum(full_begin, full_end)

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
            dq_sum_ptr,
            head,
            rows_head,
            padded_q,
            start_n,
            begin,
            full_begin,
            lo_j,
            seqlen_q,
            qk_scale,
            exp_scale,
            tree_head,
            stride_trm,
            stride_trn,
            tree_size,
            nodes,
            first_node,
            node_step,
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
            dq_sum_ptr,
            head,
            rows_head,
            padded_q,
            start_n,
            full_begin,
            full_end,
            lo_j,
            seqlen_q,
            qk_scale,
            exp_scale,
            tree_head,
            stride_trm,
            stride_trn,
            tree_size,
            nodes,
            first_node,
            node_step,
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
            dq_sum_ptr,
            head,
            rows_head,
            padded_q,
            start_n,
            full_end,
            end,
            lo_j,
            seqlen_q,
            qk_scale,
            exp_scale,
            tree_head,
            stride_trm,
            stride_trn,
            tree_size,
            nodes,
            first_node,
            node_step,
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


@triton.jit(do_not_specialize=RUN_TIME)
def attn_bwd_dq_cast(
    dq_sum_ptr,
    dq_ptr,
    stride_dqb,
    stride_dqh,
    stride_dqs,
    num_heads_q,
    seqlen_q,
    softmax_scale,
    BLOCK_M: tl.constexpr,
):
    """dq = softmax_scale * dq_sum, in the dtype of q."""
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    start_m = tl.program_id(0) % num_tiles * BLOCK_M
    head = tl.program_id(0) // num_tiles
    dq_head = dq_ptr + head // num_heads_q * tl.cast(stride_dqb, tl.int64)
    dq_head += head % num_heads_q * tl.cast(stride_dqh, tl.int64)
    dq_sum = load_rows(
        dq_sum_ptr + head.to(tl.int64) * seqlen_q * HEAD_DIM,
        HEAD_DIM,
        start_m,
        seqlen_q,
        0,
        BLOCK_M,
        128,
        HEAD_DIM,
        True,
    )
    store_rows(
        dq_head,
        stride_dqs,
        start_m,
        seqlen_q,
        dq_sum * softmax_scale,
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
    dq_sum,
    *,
    softmax_scale,
    tree_mask,
    q_start=0,
    q_step=1,
    k_start=0,
    k_step=1,
    align=0,
    tree_end=None,
    config_dkdv=CONFIG_DKDV,
):
    """The launches of one call, as (kernel, grid, arguments, constants), in order.

    q, k, v, out, do, dq, dk, dv are (batch, heads, seqlen, dim), the last stride 1. Pointers and
    other strides of q, k, v and do must be multiples of 16 bytes.
    lse and dlse (or None) are (batch, heads, seqlen_q), float32, contiguous. rows is scratch:
    (batch, heads, 2, padded seqlen_q), float32, contiguous, padded to a multiple of 128.
    dq_sum is scratch: (batch, heads, seqlen_q, head_dim), float32, contiguous.
    tree_mask is bool, (batch, n, n), any strides. The tree's keys stand at the positions from
    tree_end - n on; tree_end is seqlen_k if None.
    """
    batch, num_heads_q, seqlen_q, _ = q.shape
    num_heads_kv, seqlen_k = k.shape[1:3]
    qk_scale = softmax_scale
    exp_scale = softmax_scale * LOG2E.value
    tree_start = (seqlen_k if tree_end is None else tree_end) - tree_mask.shape[2]
    heads_per_run = 1
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
        tree_mask,
        *tree_mask.stride(),
        tree_mask.shape[2],
        tree_start,
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
        dq_sum,
        rows,
        padded_q,
        num_heads_q,
        batch * num_heads_kv,
        num_heads_q // num_heads_kv,
        heads_per_run,
        *numbers,
    )
    cast = (
        dq_sum,
        dq,
        *dq.stride()[:3],
        num_heads_q,
        seqlen_q,
        softmax_scale,
    )
    tiles_cast = -(-seqlen_q // 64) * batch * num_heads_q
    grid_n = -(-seqlen_k // config_dkdv["BLOCK_N"]) * batch * num_heads_kv
    first = {"BLOCK_M": 64, "HAS_DLSE": dlse is not None}
    return [
        (attn_bwd_preprocess, (tiles, 1, 1), preprocess, first),
        (attn_bwd_dkdv, (grid_n, 1, 1), dkdv, config_dkdv),
        (attn_bwd_dq_cast, (tiles_cast, 1, 1), cast, {"BLOCK_M": 64}),
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
    tree_mask,
):
    """The same in plain PyTorch, float32: out and lse."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.float(), *(x.float().repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(2, 3) * softmax_scale
    hidden = s.new_zeros(q.shape[0], q.shape[2], k.shape[2], dtype=torch.bool)
    hidden[:, -tree_mask.shape[1] :, -tree_mask.shape[1] :] = ~tree_mask
    s = s.masked_fill(hidden[:, None], float("-inf"))
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
    tree = torch.rand(1, 24, 24, device=device) < 0.5
    numbers["tree_mask"] = tree | torch.eye(24, dtype=torch.bool, device=device)
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
