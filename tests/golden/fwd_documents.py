"""Attention forward: bfloat16, head_dim 128, documents, tiles by pointer.

Emitted by attngen 0.1. Stands alone (torch and triton only): read, edit and run it.
  spec    head_dim=128,dtype=bfloat16,documents=true
  config  lowering=triton,tiles=pointer,block_m=128,block_n=64,num_warps=4,num_stages=2
  again   attngen emit SPEC --direction fwd --config CONFIG, with SPEC and CONFIG as above
softmax_scale, softcap, dropout_p, window sizes, lengths and strides are arguments of launch().
"""

import torch
import triton
import triton.language as tl

HEAD_DIM = tl.constexpr(128)
HEAD_DIM_V = tl.constexpr(128)
UNIT = tl.constexpr(8)  # elements in 16 bytes
LOG2E = tl.constexpr(1.4426950408889634)
LARGE = tl.constexpr(4096.0)  # of row maxima; beyond it, rounding s * exp_scale would show in P
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
]

CONFIG = {
    "BLOCK_M": 128,
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
    ids,
    doc_k_head,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTIAL: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Online softmax over the key tiles lo .. hi (FlashAttention-2, algorithm 1, the inner loop).

    acc is unnormalised, m_i is the row maximum of s * exp_scale, and l_i the sum of
    exp2(s * exp_scale - m_i). In PARTIAL tiles row i sees the keys 0 .. hi_i only.
    ids are the documents of the rows: keys of others are hidden there, too.

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
            others, _ = load_ids(doc_k_head, start_n, seqlen_k, BLOCK_N)
            keep &= ids[:, None] == others[None, :]
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
def attn_fwd(
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
    num_heads,
    group_size,
    heads_per_run,
    seqlen_q,
    seqlen_k,
    qk_scale,
    exp_scale,
    doc_q_ptr,
    stride_doc_q,
    doc_k_ptr,
    stride_doc_k,
    doc_tiles_ptr,
    num_doc_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_M query rows of one head against every key they see."""
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, head = locate(tl.program_id(0), num_tiles, num_heads, heads_per_run)
    batch = head // num_heads_q
    head_q = head % num_heads_q
    head_kv = head_q // group_size
    start_m = tile * BLOCK_M
    q_head = q_ptr + batch * whole(stride_qb) + head_q * whole(stride_qh)
    stride_qs = whole(stride_qs)
    k_head = k_ptr + batch * whole(stride_kb) + head_kv * whole(stride_kh)
    stride_ks = whole(stride_ks)
    v_head = v_ptr + batch * whole(stride_vb) + head_kv * whole(stride_vh)
    stride_vs = whole(stride_vs)

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

    doc_q_head = doc_q_ptr + batch * tl.cast(stride_doc_q, tl.int64)
    doc_k_head = doc_k_ptr + batch * tl.cast(stride_doc_k, tl.int64)
    ids, _ = load_ids(doc_q_head, start_m, seqlen_q, BLOCK_M)
    begin = 0
    full_begin = 0
    full_end = seqlen_k // BLOCK_N * BLOCK_N
    end = seqlen_k
    hi_i = tl.zeros([BLOCK_M], tl.int32) + seqlen_k
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
    row_sums = tl.sum(acc, 1)
    again = row_sums != row_sums  # NaN, perhaps of hidden keys
    again |= (m_i != float("-inf")) & (tl.abs(m_i) > LARGE)
    if tl.max(again.to(tl.int32), 0) > 0:  # rare: once more, with care
        acc = tl.zeros([BLOCK_M, 128], tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
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
            ids,
            doc_k_head,
            BLOCK_M,
            BLOCK_N,
            PARTIAL=True,
            CAREFUL=True,
        )
        m_i = m_i * exp_scale

    seen = l_i != 0.0  # false for a row that sees no key: its out is 0 and its lse -inf
    rows = start_m + tl.arange(0, BLOCK_M)
    lse = tl.where(seen, m_i + tl.log2(tl.where(seen, l_i, 1.0)), float("-inf"))
    tl.store(lse_ptr + head.to(tl.int64) * seqlen_q + rows, lse / LOG2E, rows < seqlen_q)
    norm = tl.where(seen, 1.0 / tl.where(seen, l_i, 1.0), 0.0)[:, None]
    out_head = out_ptr + batch * tl.cast(stride_ob, tl.int64)
    out_head += head_q * tl.cast(stride_oh, tl.int64)
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
    doc_tiles,
    *,
    softmax_scale,
    doc_ids_q,
    doc_ids_k,
    config=CONFIG,
):
    """The launches of one call, as (kernel, grid, arguments, constants).

    q, k, v and out are (batch, heads, seqlen, dim), the last stride 1. Pointers and other strides
    of q, k and v must be multiples of 16 bytes.
    lse is (batch, heads, seqlen_q), float32, contiguous, natural log. Scales are positive.
    doc_ids_q is (batch, seqlen_q), doc_ids_k (batch, seqlen_k), int32 or int64, the last stride 1.
    doc_tiles is scratch: (batch, 8, a sixteenth of the longer length, up), int64, contiguous.
    """
    batch, num_heads_q, seqlen_q, _ = q.shape
    num_heads_kv, seqlen_k = k.shape[1:3]
    qk_scale = softmax_scale
    exp_scale = softmax_scale * LOG2E.value
    heads_per_run = 1
    arguments = (
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
        batch * num_heads_q,
        num_heads_q // num_heads_kv,
        heads_per_run,
        seqlen_q,
        seqlen_k,
        qk_scale,
        exp_scale,
        doc_ids_q,
        doc_ids_q.stride(0),
        doc_ids_k,
        doc_ids_k.stride(0),
        doc_tiles,
        doc_tiles.shape[2],
    )
    grid = (-(-seqlen_q // config["BLOCK_M"]) * batch * num_heads_q, 1, 1)
    constants = config
    return [
        *document_launches(doc_ids_q, doc_ids_k, doc_tiles, config),
        (attn_fwd, grid, arguments, constants),
    ]


def launch(*tensors, **numbers):
    """Run the kernel; takes what plan() takes and writes out and lse."""
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
    others = doc_ids_q[:, None, :, None] != doc_ids_k[:, None, None, :]
    s = s.masked_fill(others, float("-inf"))
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
    out = torch.empty_like(v)
    lse = torch.empty(q.shape[:3], device=q.device)
    sixteenths = triton.cdiv(max(q.shape[2], k.shape[2]), 16)
    tiles = torch.empty(q.shape[0], 8, sixteenths, dtype=torch.int64, device=q.device)
    tensors = (q, k, v, out, lse, tiles)
    launch(*tensors, **numbers, **dropout)
    want, want_lse = reference(q, k, v, **numbers)
    error = ((out.float() - want).norm() / want.norm()).item()
    lse_error = (lse - want_lse).abs().max().item()
    print(f"out: relative error {error:.1e}; lse: largest error {lse_error:.1e}")
    assert error < 1e-2 and lse_error < 1e-2, "does not agree with PyTorch"
    if q.is_cuda:
        ms = triton.testing.do_bench(lambda: launch(*tensors, **numbers, **dropout))
        print(f"{ms:.3f} ms for q of shape {tuple(q.shape)}")


if __name__ == "__main__":
    main()
