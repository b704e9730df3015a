"""Attention decode: bfloat16, head_dim 128, paged, float8_e4m3fn cache by key, tiles by pointer.

Emitted by attngen 0.1. Stands alone (torch and triton only): read, edit and run it.
  spec    head_dim=128,dtype=bfloat16,paged=true,kv_dtype=float8_e4m3fn,kv_scale=key
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
    "stride_kdb",
    "stride_kdh",
    "stride_kds",
    "stride_vdb",
    "stride_vdh",
    "stride_vds",
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
LIFT = tl.constexpr(16384.0)  # of P, in float16: long tails of small weights add up


@triton.jit
def whole(stride):
    """A stride that is a multiple of 16 bytes, in a form that tells the compiler so."""
    return tl.cast(stride, tl.int64) // UNIT * UNIT


COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter knows no PTX
COLUMNS_OF = tl.constexpr(  # of two pairs
    "{ .reg .b32 x; .reg .b16 even, odd; prmt.b32 x, $2, 0, 0x3120; mov.b32 {even, odd}, x; "
    "cvt.rn.f16x2.e4m3x2 $0, even; cvt.rn.f16x2.e4m3x2 $1, odd; }"
)


@triton.jit
def whole_keys(stride):
    """A stride of k or v, of elements of one byte; of v in pairs of columns."""
    return tl.cast(stride, tl.int64) // 16 * 16


@triton.jit
def whole_pairs(stride):
    """The same in pairs of columns."""
    return tl.cast(stride, tl.int64) // 16 * 8


@triton.jit
def columns_of(pairs):
    """The even and the odd columns of values that were read in pairs, in float16.

    A product wants neighbouring keys of a column next to each other, and there are instructions
    that turn tiles of 16 bits around, but none for 8.
    """
    if COMPILED:
        even, odd = tl.inline_asm_elementwise(
            COLUMNS_OF, "=r,=r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2
        )
        return even, odd
    even = pairs.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    odd = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return even, odd


@triton.jit
def power_below(x):
    """The largest power of two not above x > 0; 1 for 0."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(power == 0.0, 1.0, power)


@triton.jit
def load_scales(
    head_ptr,
    stride_page,
    stride,
    pages,
    start,
    lo,
    hi,
    COUNT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """The scales of the keys start .. start + COUNT, [1, COUNT]; 0 outside lo .. hi."""
    keys = start + tl.arange(0, COUNT)
    inside = (keys >= lo) & (keys < hi)
    ptrs = head_ptr + tl.cast(pages, tl.int64) * stride_page + keys % PAGE_SIZE * stride
    return tl.load(ptrs, inside, 0.0)[None, :]


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
def score(qk, qk_scale):
    """The raw q.k: its scale is applied inside the exponential."""
    return qk


@triton.jit
def attend(
    acc_even,
    acc_odd,
    l_i,
    m_i,
    v_peak,
    q_even,
    q_odd,
    unit,
    k_scales,
    stride_kdb,
    stride_kds,
    k_head,
    stride_kb,
    stride_ks,
    v_scales,
    stride_vdb,
    stride_vds,
    v_head,
    stride_vb,
    stride_vs,
    table_row,
    begin,
    end,
    qk_scale,
    exp_scale,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Online softmax over the keys begin .. end, in tiles (FlashAttention-2, algorithm 1).

    acc is unnormalised, m_i is the row maximum of s, and l_i the sum of exp2((s - m_i) *
    exp_scale).
    """
    pages = find_pages(table_row, begin, 0, end, BLOCK_N, PAGE_SIZE)
    for start_n in tl.range(begin, end, BLOCK_N):
        # A tile ahead, as K and V wait for them.
        next_n = start_n + BLOCK_N
        next_pages = find_pages(table_row, next_n, 0, end, BLOCK_N, PAGE_SIZE)
        k = load_keys(
            k_head,
            stride_kb,
            stride_ks,
            pages,
            start_n,
            0,
            end,
            0,
            BLOCK_N,
            64,
            HEAD_DIM // 2,
            PAGE_SIZE,
        )  # [BLOCK_N, 64], of pairs
        k_even, k_odd = columns_of(k)
        qk = tl.dot(q_even, k_even.T, input_precision=PRECISION)
        qk = tl.dot(q_odd, k_odd.T, qk, input_precision=PRECISION)
        k_scale = load_scales(
            k_scales,
            stride_kdb,
            stride_kds,
            pages,
            start_n,
            0,
            end,
            BLOCK_N,
            PAGE_SIZE,
        )
        qk = qk * unit[:, None] * k_scale
        s = score(qk, qk_scale)  # [BLOCK_M, BLOCK_N]
        keys = start_n + tl.arange(0, BLOCK_N)
        keep = (keys < end)[None, :]
        s = tl.where(keep, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that saw no key yet
        p = tl.exp2((s - m_safe[:, None]) * exp_scale)
        alpha = tl.exp2((m_i - m_safe) * exp_scale)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        v_scale = load_scales(
            v_scales,
            stride_vdb,
            stride_vds,
            pages,
            start_n,
            0,
            end,
            BLOCK_N,
            PAGE_SIZE,
        )
        # acc is relative to the largest scale yet, so that what is multiplied is at most LIFT.
        v_top = tl.maximum(v_peak, tl.max(v_scale, 1))
        v_safe = tl.where(v_top == 0.0, 1.0, v_top)
        p = p * (v_scale / v_safe[:, None] * LIFT)
        alpha = alpha * (v_peak / v_safe)
        v_peak = v_top
        p = p.to(tl.float16)
        v = load_keys(
            v_head,
            stride_vb,
            stride_vs,
            pages,
            start_n,
            0,
            end,
            0,
            BLOCK_N,
            64,
            HEAD_DIM_V // 2,
            PAGE_SIZE,
        )  # [BLOCK_N, 64], of pairs
        v_even, v_odd = columns_of(v)
        acc_even = acc_even * alpha[:, None]
        acc_even = tl.dot(p, v_even, acc_even, input_precision=PRECISION)
        acc_odd = acc_odd * alpha[:, None]
        acc_odd = tl.dot(p, v_odd, acc_odd, input_precision=PRECISION)
        pages = next_pages
    return acc_even, acc_odd, l_i, m_i, v_peak


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
    k_descale_ptr,
    stride_kdb,
    stride_kdh,
    stride_kds,
    v_descale_ptr,
    stride_vdb,
    stride_vdh,
    stride_vds,
    qk_scale,
    exp_scale,
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

    hi = seqlen_k
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
    k_head = k_ptr.to(tl.pointer_type(tl.int16)) + head_kv * whole_pairs(stride_kh)
    v_head = v_ptr.to(tl.pointer_type(tl.int16)) + head_kv * whole_pairs(stride_vh)
    table_row = block_table_ptr + batch * stride_tb
    stride_kb = whole_pairs(stride_kb)
    stride_vb = whole_pairs(stride_vb)
    stride_ks = whole_pairs(stride_ks)
    stride_vs = whole_pairs(stride_vs)
    k_scales = k_descale_ptr + head_kv * tl.cast(stride_kdh, tl.int64)
    stride_kdb = tl.cast(stride_kdb, tl.int64)
    v_scales = v_descale_ptr + head_kv * tl.cast(stride_vdh, tl.int64)
    stride_vdb = tl.cast(stride_vdb, tl.int64)
    columns = 0 + tl.arange(0, 128)
    q = tl.load(q_rows[:, None] + columns[None, :])  # [BLOCK_M, 128]
    peak = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.maximum(peak, tl.max(tl.abs(q.to(tl.float32)), 1))
    unit = power_below(peak)
    q = (q.to(tl.float32) / unit[:, None]).to(tl.float16)
    q_even, q_odd = tl.split(tl.reshape(q, [BLOCK_M, 64, 2]))

    acc_even = tl.zeros([BLOCK_M, 64], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, 64], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    v_peak = tl.zeros([1], tl.float32)
    acc_even, acc_odd, l_i, m_i, v_peak = attend(
        acc_even,
        acc_odd,
        l_i,
        m_i,
        v_peak,
        q_even,
        q_odd,
        unit,
        k_scales,
        stride_kdb,
        stride_kds,
        k_head,
        stride_kb,
        stride_ks,
        v_scales,
        stride_vdb,
        stride_vds,
        v_head,
        stride_vb,
        stride_vs,
        table_row,
        begin,
        end,
        qk_scale,
        exp_scale,
        BLOCK_N,
        PAGE_SIZE,
    )
    v_unit = tl.zeros_like(l_i) + v_peak / LIFT
    acc = tl.interleave(acc_even, acc_odd)
    acc *= v_unit[:, None]

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
    k_descale,
    v_descale,
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
    k and v are float8_e4m3fn. k_descale and v_descale, float32, multiply them:
    (pages, page size, heads).
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
        k_descale,
        *(k_descale.stride(n) for n in (0, 2, 1)),
        v_descale,
        *(v_descale.stride(n) for n in (0, 2, 1)),
        qk_scale,
        exp_scale,
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


def quantized(x):
    """x (1, heads, keys, dim) in 8 bits, and the scale of each key, (1, heads, keys)."""
    scale = x.float().abs().amax(3)
    scale = scale / 448
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def main():
    """Check against PyTorch on random data, then print the time."""
    (q, k, v), numbers, _ = example()
    if not q.is_cuda and not triton.knobs.runtime.interpret:
        raise SystemExit("no GPU here: run it again with TRITON_INTERPRET=1, in the interpreter")
    if not q.is_cuda:
        print("no GPU here: checked with float32 data, not bfloat16")
    (stored_k, k_scale), (stored_v, v_scale) = quantized(k), quantized(v)
    k, v = stored_k.float() * k_scale[..., None], stored_v.float() * v_scale[..., None]
    want, want_lse = (x[:, :, -ROWS:] for x in reference(q, k, v, **numbers))
    q, length = q[:, :, -ROWS:], k.shape[2]
    k, v = (
        torch.nn.functional.pad(x.view(torch.int8), (0, -x.shape[3] % 16)).view(x.dtype)[
            ..., : x.shape[3]
        ]
        for x in (stored_k, stored_v)
    )
    numbers["seqused_k"] = torch.full((1,), length, dtype=torch.int32, device=q.device)
    page_size, count = 16, -(-length // 16)
    order = torch.randperm(count + 2, device=q.device)[:count]
    pages = [
        x.new_zeros(count + 2, page_size, x.shape[1], -(-x.shape[3] // 16) * 16) for x in (k, v)
    ]
    pages = [cache[..., : x.shape[3]] for cache, x in zip(pages, (k, v), strict=True)]
    for name, x in (("k_descale", k_scale), ("v_descale", v_scale)):
        padded = torch.nn.functional.pad(x[0].T, (0, 0, 0, -length % page_size))
        numbers[name] = x.new_full((count + 2, page_size, x.shape[1]), float("nan"))
        numbers[name][order] = padded.unflatten(0, (count, page_size))
    for cache, x in zip(pages, (k, v), strict=True):
        cache, x = cache.view(torch.int8), x.view(torch.int8)
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
