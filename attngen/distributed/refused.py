"""What attention over ranks does not have, and why."""

from __future__ import annotations

from attngen.errors import UnsupportedSpecError
from attngen.spec import AttentionSpec

REFUSED = {
    "tree_mask": "trees of draft tokens are short: attend to them on each rank",
    "block_map": "a map lists tiles of the whole; say the mask by mask_mod alone",
    "return_aux": "side outputs are not gathered; pass return_lse=True for lse",
    "seqused_q": "used lengths are of rows that other ranks hold; cut the padding off",
    "seqused_k": "used lengths are of rows that other ranks hold; cut the padding off",
    "block_table": "a paged cache lies on one device",
    "q_descale": "FP8 inputs are not built; dequantise them to bfloat16",
    "k_descale": "FP8 inputs are not built; dequantise them to bfloat16",
    "v_descale": "FP8 inputs are not built; dequantise them to bfloat16",
    "q_start": "rows are placed by the layout",
    "q_step": "rows are placed by the layout",
    "k_start": "rows are placed by the layout",
    "k_step": "rows are placed by the layout",
    "partial": "partial results are joined here",
}
"""Arguments of attngen.attention that stay on one device, and why."""


def refuse_spec(spec: AttentionSpec, method: str) -> None:
    """Refuse what is not built over ranks, with every reason."""
    why = []
    if spec.is_fp8:
        why.append(REFUSED["q_descale"])
    why += [f"tree_mask: {REFUSED['tree_mask']}"] if spec.tree_mask else []
    why += [f"block_map: {REFUSED['block_map']}"] if spec.block_map else []
    why += [f"aux={':'.join(spec.aux)}: {REFUSED['return_aux']}"] if spec.aux else []
    if spec.has_lengths:
        why.append("key_lengths and paged caches lie on one device")
    if spec.shared_kv:
        why.append("shared_kv: k and v travel as tensors of their own")
    if method in ("ulysses", "usp") and spec.has_score_entries:
        named = " and ".join(x for x in ("attn_mask", "bias") if getattr(spec, x))
        why.append(
            f"{named} with method {method}: a rank has the entries of its own rows alone, and "
            'computes those of others; use method="ring" or "allgather"'
        )
    if spec.is_packed:
        why += unpacked(spec)
    if why:
        raise UnsupportedSpecError([f"context parallelism: {each}" for each in why])


def unpacked(spec: AttentionSpec) -> list[str]:
    """What counts rows in each packed sequence, where shards know positions in the whole alone."""
    named = {"dropout": spec.has_dropout, "chunk": spec.has_chunk, "prefix_lm": spec.prefix_lm}
    named |= {"score_mod and mask_mod": spec.has_functions}
    return [
        f"{name} of packed sequences counts rows in each sequence, shards count them in the whole; "
        "use one batch row for each sequence"
        for name, is_on in named.items()
        if is_on
    ]
