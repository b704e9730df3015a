"""Attention forward: bfloat16, head_dim 128, mask_mod, tiles by pointer.

Emitted by attngen 0.1. Stands alone (torch and triton only): read, edit and run it.
  spec    head_dim=128,dtype=bfloat16,mask_mod=aux0:long2;t0:index aux0 b q;t1:index aux0 b k;
          eq t0 t1
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
    "aux0_size0",
    "aux0_size1",
    "aux0_stride0",
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
def entry(i, size):
    """Where index i is: from the end if negative, and at the nearest entry if there is none."""
    i = tl.where(i < 0, i + size, i)
    return tl.minimum(tl.maximum(i, 0), size - 1).to(tl.int64)


@triton.jit
def mask_mod(
    b,
    h,
    q_idx,
    k_idx,
    aux0_ptr,
    aux0_size0,
    aux0_size1,
    aux0_stride0,
    aux0_stride1,
):
    """May query q_idx see key k_idx?"""
    at = entry(b, aux0_size0) * aux0_stride0
    at += entry(q_idx, aux0_size1) * aux0_stride1
    t0 = tl.load(aux0_ptr + at).to(tl.int64)
    at = entry(b, aux0_size0) * aux0_stride0
    at += entry(k_idx, aux0_size1) * aux0_stride1
    t1 = tl.load(aux0_ptr + at).to(tl.int64)
    t2 = t0 == t1
    return t2


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
    seqlen_q,
    seqlen_k,
    qk_scale,
    exp_scale,
    q_start,
    q_step,
    k_start,
    k_step,
    batch_row,
    head_row,
    aux0_ptr,
    aux0_size0,
    aux0_size1,
    aux0_stride0,
    aux0_stride1,
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
        q_idx = (q_start + (start_m + tl.arange(0, BLOCK_M)) * q_step)[:, None]
        k_idx = (k_start + (start_n + tl.arange(0, BLOCK_N)) * k_step)[None, :]
        if PARTIAL:
            columns = tl.arange(0, BLOCK_N)[None, :]
            keep = columns < (hi_i - start_n)[:, None]
            keep &= mask_mod(
                batch_row,
                head_row,
                q_idx,
                k_idx,
                aux0_ptr,
                aux0_size0,
                aux0_size1,
                aux0_stride0,
                aux0_stride1,
            )
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
    batch_start,
    head_start,
    aux0_ptr,
    aux0_size0,
    aux0_size1,
    aux0_stride0,
    aux0_stride1,
    q_start,
    q_step,
    k_start,
    k_step,
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
    batch_row = batch_start + batch
    head_row = head_start + head_q

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

    end = seqlen_k
    hi_i = tl.zeros([BLOCK_M], tl.int32) + seqlen_k
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
        seqlen_q,
        seqlen_k,
        qk_scale,
        exp_scale,
        q_start,
        q_step,
        k_start,
        k_step,
        batch_row,
        head_row,
        aux0_ptr,
        aux0_size0,
        aux0_size1,
        aux0_stride0,
        aux0_stride1,
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
            seqlen_q,
            seqlen_k,
            qk_scale,
            exp_scale,
            q_start,
            q_step,
            k_start,
            k_step,
            batch_row,
            head_row,
            aux0_ptr,
            aux0_size0,
            aux0_size1,
            aux0_stride0,
            aux0_stride1,
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


def plan(
    q,
    k,
    v,
    out,
    lse,
    *,
    softmax_scale,
    batch_start=0,
    head_start=0,
    aux0,
    q_start=0,
    q_step=1,
    k_start=0,
    k_step=1,
    config=CONFIG,
):
    """The launches of one call, as (kernel, grid, arguments, constants).

    q, k, v and out are (batch, heads, seqlen, dim), the last stride 1. Pointers and other strides
    of q, k and v must be multiples of 16 bytes.
    lse is (batch, heads, seqlen_q), float32, contiguous, natural log. Scales are positive.
    aux0 is long, of 2 dims, none empty, any strides.
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
        batch_start,
        head_start,
        aux0,
        *aux0.shape,
        *aux0.stride(),
        q_start,
        q_step,
        k_start,
        k_step,
    )
    grid = (-(-seqlen_q // config["BLOCK_M"]) * batch * num_heads_q, 1, 1)
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
    softmax_scale,
    softcap=None,
    window_left=None,
    window_right=None,
    aux0,
):
    """The same in plain PyTorch, float32: out and lse."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.float(), *(x.float().repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(2, 3) * softmax_scale
    b, h, q_idx, k_idx = (torch.arange(n, device=q.device) for n in s.shape)
    place = b[:, None, None, None], h[:, None, None], q_idx[:, None], k_idx
    s = s.masked_fill(~plain_mask_mod(*place, aux0), float("-inf"))
    shown = (s != float("-inf")).any(-1, keepdim=True)
    s = s.masked_fill(~shown, 0.0)  # a row that sees no key
    lse = torch.logsumexp(s, -1).masked_fill(~shown[..., 0], float("-inf"))
    return torch.softmax(s, -1) @ v * shown, lse


FLOAT = torch.float32


def entry_of(x, *at):
    """x[at]: a negative index counts from the end, and past either end is the nearest entry."""
    indices = [torch.as_tensor(i, device=x.device) for i in at]
    sizes = zip(indices, x.shape, strict=True)
    return x[tuple(torch.where(i < 0, i + n, i).clamp(0, n - 1) for i, n in sizes)]


def plain_mask_mod(
    b,
    h,
    q_idx,
    k_idx,
    aux0,
):
    """mask_mod in PyTorch."""
    t0 = entry_of(aux0, b, q_idx)
    t1 = entry_of(aux0, b, k_idx)
    t2 = t0 == t1
    return t2


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
        "aux0": torch.randint(0, 3, (16, seqlen), dtype=torch.int64, device=device),
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
    lse_error = (lse - want_lse).nan_to_num().abs().max().item()  # -inf is equal to -inf
    print(f"out: relative error {error:.1e}; lse: largest error {lse_error:.1e}")
    assert error < 1e-2 and lse_error < 1e-2, "does not agree with PyTorch"
    if q.is_cuda:
        ms = triton.testing.do_bench(lambda: launch(q, k, v, out, lse, **numbers, **dropout))
        print(f"{ms:.3f} ms for q of shape {tuple(q.shape)}")


if __name__ == "__main__":
    main()
