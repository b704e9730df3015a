"""Attention forward: bfloat16, head_dim 128, causal, packed, tiles by pointer.

Emitted by attngen 0.1. Stands alone (torch and triton only): read, edit and run it.
  spec    head_dim=128,dtype=bfloat16,causal=true,layout=thd
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
FAN = tl.constexpr(128)  # sequences that a step of the search for a tile's own looks at
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
    total_q,
    total_k,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_q_ptr,
    seqused_k_ptr,
    num_seqs,
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
    """One program: BLOCK_M query rows of one head against every key they see."""
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
        m_i = m_i * exp_scale

    seen = l_i != 0.0  # false for a row that sees no key: its out is 0 and its lse -inf
    rows = start_m + tl.arange(0, BLOCK_M)
    seen &= rows < seqlen_q
    lse_head = lse_ptr + head.to(tl.int64) * total_q + begin_q
    lse = tl.where(seen, m_i + tl.log2(tl.where(seen, l_i, 1.0)), float("-inf"))
    tl.store(lse_head + rows, lse / LOG2E, rows < owned_q)
    norm = tl.where(seen, 1.0 / tl.where(seen, l_i, 1.0), 0.0)[:, None]
    out_head = out_ptr + begin_q * tl.cast(stride_os, tl.int64)
    out_head += head_q * tl.cast(stride_oh, tl.int64)
    store_rows(
        out_head,
        stride_os,
        start_m,
        owned_q,
        tl.where(seen[:, None], acc * norm, 0.0),
        0,
        BLOCK_M,
        128,
        HEAD_DIM_V,
    )


def plan(
    q,
    k,
    v,
    out,
    lse,
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
    config=CONFIG,
):
    """The launches of one call, as (kernel, grid, arguments, constants).

    q, k, v and out are (batch, heads, seqlen, dim), the last stride 1. Pointers and other strides
    of q, k and v must be multiples of 16 bytes.
    lse is (batch, heads, seqlen_q), float32, contiguous, natural log. Scales are positive.
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
    kv_bytes = seqlen_k * (HEAD_DIM.value + HEAD_DIM_V.value) * q.element_size()
    heads_per_run = max(1, (16 << 20) // kv_bytes) * (num_heads_q // num_heads_kv)
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
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_q if seqused_q is None else seqused_q,
        cu_seqlens_k if seqused_k is None else seqused_k,
        num_seqs,
        qk_scale,
        exp_scale,
        q_start,
        q_step,
        k_start,
        k_step,
        align,
    )
    grid = ((seqlen_q // config["BLOCK_M"] + num_seqs + 2) * num_heads_q, 1, 1)
    used = {"HAS_USED_Q": seqused_q is not None, "HAS_USED_K": seqused_k is not None}
    config = {**config, **used}
    return [(attn_fwd, grid, arguments, config)]


def launch(*tensors, **numbers):
    """Run the kernel; takes what plan() takes and writes out and lse."""
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
