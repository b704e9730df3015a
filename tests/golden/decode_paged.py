"""Attention decode: bfloat16, head_dim 128, causal, paged, tiles by pointer.

Emitted by attngen 0.1. Stands alone (torch and triton only): read, edit and run it.
  spec    head_dim=128,dtype=bfloat16,causal=true,paged=true
  config  lowering=triton,tiles=pointer,block_m=16,block_n=128,num_warps=4,num_stages=3,
          programs_per_sm=1,split_keys=0,merge=kernel
  again   attngen emit SPEC --direction decode --config CONFIG, with SPEC and CONFIG as above
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
    "batch_start",
    "head_start",
    "threshold",
    "num_splits",
    "num_heads_kv",
    "num_rows",
    "stride_tb",
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
    "BLOCK_M": 16,
    "BLOCK_N": 128,
    "SPLIT_KEYS": 0,
    "num_warps": 4,
    "num_stages": 3,
}
MERGED = tl.constexpr(16)  # splits that the merge reads at a time


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
def whole(stride):
    """A stride that is a multiple of 16 bytes, in a form that tells the compiler so."""
    return tl.cast(stride, tl.int64) // UNIT * UNIT


@triton.jit
def find_pages(table_ptr, start, lo, hi, COUNT: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The pages of the keys start .. start + COUNT, a tile of its own: one page, if tiles divide
    it, or that of each key. What lies outside lo .. hi has page 0, and its entries of the table
    are not read."""
    if PAGE_SIZE % COUNT == 0:
        is_read = (start < hi) & (start + COUNT > lo)
        pages = tl.load(table_ptr + start // PAGE_SIZE, is_read, 0)
    else:
        keys = start + tl.arange(0, COUNT)
        pages = tl.load(table_ptr + keys // PAGE_SIZE, (keys >= lo) & (keys < hi), 0)
    return pages


@triton.jit
def load_keys(
    head_ptr,
    stride_page,
    stride,
    pages,
    start,
    lo,
    hi,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Keys start .. start + COUNT and columns FIRST .. FIRST + WIDTH of one head.

    Keys outside lo .. hi and columns from DIM on read as zero.
    """
    keys = start + tl.arange(0, COUNT)
    columns = FIRST + tl.arange(0, WIDTH)
    inside = ((keys >= lo) & (keys < hi))[:, None]
    if PAGE_SIZE % COUNT == 0:
        head_ptr += pages.to(tl.int64) * stride_page + start % PAGE_SIZE * stride
        rows = tl.arange(0, COUNT) * stride
    elif COUNT % PAGE_SIZE == 0:
        rows = pages.to(tl.int64) * stride_page + tl.arange(0, COUNT) % PAGE_SIZE * stride
    else:
        rows = pages.to(tl.int64) * stride_page + keys % PAGE_SIZE * stride
    ptrs = head_ptr + rows[:, None] + columns[None, :]
    if FIRST + WIDTH > DIM:
        inside &= (columns < DIM)[None, :]
    return tl.load(ptrs, inside, 0.0)


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
    stride_kb,
    stride_ks,
    v_head,
    stride_vb,
    stride_vs,
    table_row,
    lo,
    begin,
    end,
    hi_i,
    qk_scale,
    exp_scale,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Online softmax over the keys begin .. end, in tiles (FlashAttention-2, algorithm 1).

    acc is unnormalised, m_i is the row maximum of s, and l_i the sum of exp2((s - m_i) *
    exp_scale).
    Row i sees the keys before hi_i only.

    CAREFUL is for NaN and inf in hidden keys, whose weight is zero, but zero times NaN is NaN.
    """
    pages = find_pages(table_row, begin, lo, end, BLOCK_N, PAGE_SIZE)
    for start_n in tl.range(begin, end, BLOCK_N, num_stages=1 if CAREFUL else None):
        # A tile ahead, as K and V wait for them.
        next_n = start_n + BLOCK_N
        next_pages = find_pages(table_row, next_n, lo, end, BLOCK_N, PAGE_SIZE)
        k = load_keys(
            k_head,
            stride_kb,
            stride_ks,
            pages,
            start_n,
            lo,
            end,
            0,
            BLOCK_N,
            128,
            HEAD_DIM,
            PAGE_SIZE,
        )  # [BLOCK_N, 128]
        qk = tl.dot(q, k.T, input_precision=PRECISION)
        s = score(qk, qk_scale)  # [BLOCK_M, BLOCK_N]
        keys = start_n + tl.arange(0, BLOCK_N)
        keep = (keys < end)[None, :]
        keep &= keys[None, :] < hi_i[:, None]
        s = tl.where(keep, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that saw no key yet
        p = tl.exp2((s - m_safe[:, None]) * exp_scale)
        alpha = tl.exp2((m_i - m_safe) * exp_scale)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        v = load_keys(
            v_head,
            stride_vb,
            stride_vs,
            pages,
            start_n,
            lo,
            end,
            0,
            BLOCK_N,
            128,
            HEAD_DIM_V,
            PAGE_SIZE,
        )  # [BLOCK_N, 128]
        if CAREFUL:
            v, tainted = finite(v)
            sees_tainted = tl.max((keep & tainted[None, :]).to(tl.int32), 1) > 0
            l_i = tl.where(sees_tainted, float("nan"), l_i)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        pages = next_pages
    return acc, l_i, m_i


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
    acc = tl.zeros([128], tl.float32)
    for first in range(0, num_splits, MERGED):
        splits = first + tl.arange(0, MERGED)
        is_split = splits < num_splits
        outs_ptr = partials_ptr + splits * stride + row.to(tl.int64) * HEAD_DIM_V
        m_i = tl.load(m_ptr + splits * stride, is_split, float("-inf"))
        l_i = tl.load(l_ptr + splits * stride, is_split, 0.0)
        columns = 0 + tl.arange(0, 128)
        inside = is_split[:, None]
        outs = tl.load(outs_ptr[:, None] + columns[None, :], inside, 0.0)  # [MERGED, 128]
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
    columns = 0 + tl.arange(0, 128)
    value = (acc * norm).to(out_row.dtype.element_ty)
    tl.store(out_row + columns, value)


@triton.jit(do_not_specialize=RUN_TIME)
def attn_decode(
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
    q_start,
    q_step,
    k_start,
    k_step,
    align,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """One program: BLOCK_M rows that share a key/value head against one split of its keys.

    Rows are the query rows of all heads of the group, the heads of a query row next to each other.
    """
    group_rows = seqlen_q * group_size
    num_tiles = tl.cdiv(group_rows, BLOCK_M)
    tile = tl.program_id(0) % num_tiles
    split = tl.program_id(0) // num_tiles % num_splits
    head = tl.program_id(0) // num_tiles // num_splits
    batch = (head // num_heads_kv).to(tl.int64)
    head_kv = (head % num_heads_kv).to(tl.int64)
    q_ptr += batch * whole(stride_qb)
    out_ptr += batch * tl.cast(stride_ob, tl.int64)
    row_zero = (batch * num_heads_kv * group_size + head_kv * group_size) * seqlen_q  # of lse
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < group_rows
    rows = tl.minimum(rows, group_rows - 1)  # past the end the last row is computed again
    row_q = rows // group_size
    head_q = head_kv * group_size + rows % group_size
    row = row_zero + rows % group_size * seqlen_q + row_q
    seqlen_k = tl.minimum(tl.maximum(tl.load(seqused_k_ptr + batch), 0), seqlen_k)
    align *= seqlen_k - seqlen_q

    lo, _, _, hi = visible_keys(
        tile * BLOCK_M // group_size,
        (tl.minimum(tile * BLOCK_M + BLOCK_M, group_rows) - 1) // group_size,
        seqlen_k,
        q_start,
        q_step,
        k_start,
        k_step,
        align,
    )
    lo_i, _, _, hi_i = visible_keys(
        row_q,
        row_q,
        seqlen_k,
        q_start,
        q_step,
        k_start,
        k_step,
        align,
    )
    begin = 0
    end = hi
    if IS_SPLIT:
        size = SPLIT_KEYS
        if SPLIT_KEYS == 0:
            size = tl.cdiv(tl.cdiv(tl.maximum(hi - begin, 0), BLOCK_N), num_splits) * BLOCK_N
        begin += split * size
        end = tl.minimum(hi, begin + size)
        out_ptr = partials_ptr + split.to(tl.int64) * num_rows * (HEAD_DIM_V + 2)
        l_ptr = out_ptr + num_rows.to(tl.int64) * HEAD_DIM_V
        m_ptr = l_ptr + num_rows
        if begin >= end:  # a split behind the last key
            tl.store(l_ptr + row, 0.0, is_row)
            tl.store(m_ptr + row, float("-inf"), is_row)
            return

    q_rows = q_ptr + head_q * whole(stride_qh) + row_q * whole(stride_qs)
    k_head = k_ptr + head_kv * whole(stride_kh)
    v_head = v_ptr + head_kv * whole(stride_vh)
    table_row = block_table_ptr + batch * stride_tb
    stride_kb = whole(stride_kb)
    stride_vb = whole(stride_vb)
    stride_ks = whole(stride_ks)
    stride_vs = whole(stride_vs)
    columns = 0 + tl.arange(0, 128)
    q = tl.load(q_rows[:, None] + columns[None, :])  # [BLOCK_M, 128]

    acc = tl.zeros([BLOCK_M, 128], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc, l_i, m_i = attend(
        acc,
        l_i,
        m_i,
        q,
        k_head,
        stride_kb,
        stride_ks,
        v_head,
        stride_vb,
        stride_vs,
        table_row,
        lo,
        begin,
        end,
        hi_i,
        qk_scale,
        exp_scale,
        BLOCK_N,
        PAGE_SIZE,
        CAREFUL=False,
    )
    row_sums = tl.sum(acc, 1)
    again = row_sums != row_sums  # NaN, perhaps of hidden keys
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
            stride_kb,
            stride_ks,
            v_head,
            stride_vb,
            stride_vs,
            table_row,
            lo,
            begin,
            end,
            hi_i,
            qk_scale,
            exp_scale,
            BLOCK_N,
            PAGE_SIZE,
            CAREFUL=True,
        )

    seen = l_i != 0.0  # false for a row that sees no key: its out is 0 and its lse -inf
    l_safe = tl.where(seen, l_i, 1.0)
    norm = tl.where(seen, 1.0 / l_safe, 0.0)
    lse = tl.where(seen, (m_i * exp_scale + tl.log2(l_safe)) / LOG2E, float("-inf"))
    # Splits hand on m_i and l_i, as lse would round what maxima of 1e5 differ by, and acc as it is:
    # a row that one split sees has the bits of a call with one split.
    if IS_SPLIT:
        norm = tl.where(seen, 1.0, 0.0)
        tl.store(l_ptr + row, l_i, is_row)
        tl.store(m_ptr + row, m_i, is_row)
        out_rows = out_ptr + row * HEAD_DIM_V
    else:
        tl.store(lse_ptr + row, lse, is_row)
        out_rows = out_ptr + head_q * tl.cast(stride_oh, tl.int64)
        out_rows += row_q * tl.cast(stride_os, tl.int64)
    columns = 0 + tl.arange(0, 128)
    inside = is_row[:, None]
    value = (acc * norm[:, None]).to(out_rows.dtype.element_ty)
    tl.store(out_rows[:, None] + columns[None, :], value, inside)


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
    q_start=0,
    q_step=1,
    k_start=0,
    k_step=1,
    align=0,
    config=CONFIG,
):
    """The launches of one call, as (kernel, grid, arguments, constants).

    q and out are (batch, heads, seqlen, dim), k and v (pages, heads, page size, dim), the last
    stride 1. Pointers and other strides of q, k and v must be multiples of 16 bytes.
    lse is (batch, heads, seqlen_q), float32, contiguous, natural log. Scales are positive.
    partials is scratch, float32, contiguous: (number of splits, batch * heads * seqlen_q *
    (head_dim_v + 2)); None is one split.
    seqused_k (batch,), int32, contiguous, says how many keys of each batch row are used.
    block_table (batch, max pages), int32, the last stride 1, names the pages of each batch row.
    """
    batch, num_heads_q, seqlen_q, _ = q.shape
    num_heads_kv, page_size = k.shape[1:3]
    seqlen_k = block_table.shape[1] * page_size
    num_rows = batch * num_heads_q * seqlen_q
    num_splits = 1 if partials is None else partials.shape[0]
    qk_scale = softmax_scale
    exp_scale = softmax_scale * LOG2E.value
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
        q_start,
        q_step,
        k_start,
        k_step,
        align,
    )
    tiles = -(-seqlen_q * (num_heads_q // num_heads_kv) // config["BLOCK_M"])
    grid = (tiles * num_splits * batch * num_heads_kv, 1, 1)
    constants = {**config, "IS_SPLIT": num_splits > 1, "PAGE_SIZE": page_size}
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

    numbers = {
        "softmax_scale": HEAD_DIM.value**-0.5,
    }
    dropout = {}
    return [rows(HEAD_DIM.value), rows(HEAD_DIM.value), rows(HEAD_DIM_V.value)], numbers, dropout


ROWS = 2  # query rows of the check: the last of the sequence


def main():
    """Check against PyTorch on random data, then print the time."""
    (q, k, v), numbers, _ = example()
    if not q.is_cuda and not triton.knobs.runtime.interpret:
        raise SystemExit("no GPU here: run it again with TRITON_INTERPRET=1, in the interpreter")
    if not q.is_cuda:
        print("no GPU here: checked with float32 data, not bfloat16")
    want, want_lse = (x[:, :, -ROWS:] for x in reference(q, k, v, **numbers))
    q, length = q[:, :, -ROWS:], k.shape[2]
    numbers["seqused_k"] = torch.full((1,), length, dtype=torch.int32, device=q.device)
    numbers["align"] = 1
    page_size, count = 16, -(-length // 16)
    order = torch.randperm(count + 2, device=q.device)[:count]
    pages = [
        x.new_full((count + 2, page_size, x.shape[1], -(-x.shape[3] // 8) * 8), float("nan"))
        for x in (k, v)
    ]
    pages = [cache[..., : x.shape[3]] for cache, x in zip(pages, (k, v), strict=True)]
    for cache, x in zip(pages, (k, v), strict=True):
        padded = torch.nn.functional.pad(x[0].transpose(0, 1), (0, 0, 0, 0, 0, -length % page_size))
        cache[order] = padded.unflatten(0, (count, page_size))
    k, v = (x.transpose(1, 2) for x in pages)
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
