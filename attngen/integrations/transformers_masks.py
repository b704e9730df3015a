"""Masks of transformers' models without an entry for each pair of query and key.

`structured_mask` is what transformers calls, once for all layers of a kind, before any layer runs.
torch.compile traces it, and so no function here imports but `load`: transformers' package is a lazy
module, which torch 2.11 refuses there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attngen.decode import MAX_ROWS

masking_utils: Any = None
"""transformers' module of this name, once `load` has run."""


class StructuredMask(BlockMask):
    """Which keys each query sees, without an entry for each pair.

    A BlockMask by its type alone, which transformers hands on untouched. Where a model computes
    with its mask, it becomes the dense one.
    """

    def __init__(
        self,
        sizes: tuple[Any, int, Any, Any],
        traits: _Traits,
        *,
        start: Any,
        key_start: int,
        keys: Any,
        used: Tensor | None,
        pad: Tensor | None,
        documents: tuple[Tensor, Tensor] | None,
        device: Any,
        packing: dict[str, Tensor] | None = None,
    ) -> None:
        """
        Args:
            sizes: (batch, 1, q_length, kv_length).
            traits: of positions: query i stands at start + i, key j at key_start + j.
            start: an int, or where the cache keeps its length on the device, a tensor of no dims.
            keys: how many keys there are, the last of them the last query's; None for all.
            used: the same of each batch row, int32 (batch,), where start is a tensor.
            pad: bool (batch, kv_length), False for a key that is padding.
            documents: int32 ids of queries and keys, (1 or batch, length).
            packing: where padding leaves the keys of each row one sequence, the arguments of
                `attngen.attention` that say so of rows of all of the batch.
        """
        self.sizes = sizes
        self.causal = traits.causal
        self.window = (traits.left, None if traits.causal else traits.right)
        self.chunk = traits.chunk
        self.start = start
        self.key_start = key_start
        self.keys = keys
        self.used = used
        self.pad = pad
        self.documents = documents
        self.packing = packing
        self.place = device
        self.is_aligned = True
        """Do the queries end where the keys end?"""
        if used is None and (traits.causal or self.window != (None, None) or self.chunk):
            end = sizes[3] if keys is None else keys
            self.is_aligned = key_start == 0 and start + sizes[2] == end

    @property
    def shape(self) -> Any:
        return self.sizes

    @property
    def ndim(self) -> int:
        return 4

    @property
    def device(self) -> Any:
        return self.place

    def dense(self) -> Tensor:
        """The mask as bool (batch, 1, q_length, kv_length)."""
        batch, _, rows, keys = self.sizes
        number = torch.arange(keys, device=self.place)
        i = torch.arange(rows, device=self.place)[:, None] + self.start
        j = number + self.key_start
        seen = torch.ones((rows, keys), dtype=torch.bool, device=self.place)
        left, right = self.window
        if self.causal:
            seen = seen & (j <= i)
        if left is not None:
            seen = seen & (j >= i - left)
        if right is not None:
            seen = seen & (j <= i + right)
        if self.chunk is not None:
            seen = seen & (i // self.chunk == j // self.chunk)
        seen = seen.expand(batch, 1, rows, keys)
        if self.keys is not None:
            seen = seen & (number < self.keys)
        if self.used is not None:
            seen = seen & (number < self.used[:, None, None, None])
        if self.pad is not None:
            seen = seen & self.pad[:, None, None, :]
        if self.documents is not None:
            ids_q, ids_k = self.documents
            seen = seen & (ids_q[:, None, :, None] == ids_k[:, None, None, :])
        return seen

    def to(self, *args: Any, **named: Any) -> Any:
        """On another device; of another dtype, the dense mask."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **named)
        if dtype is not None or device is None:
            return self.dense().to(*args, **named)
        found = object.__new__(type(self))
        for name, x in vars(self).items():
            setattr(found, name, x.to(device) if isinstance(x, Tensor) else x)
        if self.documents is not None:
            found.documents = (self.documents[0].to(device), self.documents[1].to(device))
        if self.packing is not None:
            found.packing = {name: x.to(device) for name, x in self.packing.items()}
        found.place = device
        return found

    def __getitem__(self, index: Any) -> Any:
        return self.dense()[index]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        flat, tree = torch.utils._pytree.tree_flatten((args, kwargs or {}))
        flat = [x.dense() if isinstance(x, StructuredMask) else x for x in flat]
        args, kwargs = torch.utils._pytree.tree_unflatten(flat, tree)
        return function(*args, **kwargs)

    def __repr__(self) -> str:
        traits = [f"{tuple(self.sizes)}", f"causal={self.causal}", f"start={self.start}"]
        traits += [] if self.window == (None, None) else [f"window={self.window}"]
        traits += [] if self.chunk is None else [f"chunk={self.chunk}"]
        traits += [x for x in ("used", "pad", "documents") if getattr(self, x) is not None]
        return f"StructuredMask({', '.join(traits)})"

    __str__ = __repr__


# ---- from transformers' mask functions to structure -------------------------------------------


class _Traits(NamedTuple):
    """What a mask function says, of positions in the whole sequence."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    documents: Tensor | None = None
    """Ids of the rows, (batch, length)."""


def structured_mask(
    batch_size: Any,
    q_length: Any,
    kv_length: Any,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    packed: bool = True,
    config: Any = None,
    **options: Any,
) -> Any:
    """A mask function of transformers.

    Returns:
        None for plain causal (rows that stand first, or one row) and plain bidirectional attention,
        a StructuredMask, or bool (batch, 1, q_length, kv_length).
    """
    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    traits = None
    if not use_vmap and not torch.compiler.is_compiling():
        traits = _read(mask_function, attention_mask is None)
    elif not use_vmap:
        may_pack = attention_mask is None and not allow_is_causal_skip and q_length > 1
        may_pack = may_pack and allow_is_bidirectional_skip is None  # which causal masks lack
        may_pack = may_pack and isinstance(q_offset, int) and q_offset == 0
        chunk_size = getattr(config, "attention_chunk_size", None)
        if local_size is None or local_size != chunk_size:
            rows = (batch_size, q_length, device) if may_pack else None
            traits = _trace(mask_function, local_size, rows, packed)
    found = None
    if traits is not None:
        may_skip = allow_is_causal_skip if traits.causal else bool(allow_is_bidirectional_skip)
        if may_skip or q_length == 1 or traits.documents is not None:
            sizes = (batch_size, 1, q_length, kv_length)
            found = _placed(traits, sizes, q_offset, kv_offset, attention_mask, device)
        if found is not None:
            return None if may_skip and _says_nothing(found) else found
    return masking_utils.sdpa_mask(  # the model computes with it, or it has no structure
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )


def load() -> None:
    """Find transformers' mask functions; `structured_mask` needs it to have run."""
    global masking_utils
    from transformers import masking_utils as module

    masking_utils = module


def _read(function: Callable[..., Any], is_unpadded: bool) -> _Traits | None:
    """What a mask function says, from the names of its parts; None where it says anything else."""
    if function is masking_utils.causal_mask_function:
        return _Traits(causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return _Traits()
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    maker = getattr(function, "__qualname__", "").partition(".")[0]
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return None
    held = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    if maker == "and_masks":
        found = _Traits()
        for part in held["mask_functions"]:
            traits = _read(part, is_unpadded)
            both = None if traits is None else _both(found, traits)
            if both is None:
                return None
            found = both
        return found
    if maker == "sliding_window_overlay":
        return _Traits(left=held["sliding_window"] - 1)
    if maker == "sliding_window_bidirectional_overlay":
        return _Traits(left=held["sliding_window"], right=held["sliding_window"])
    if maker == "chunked_overlay":  # chunks are counted from each row's first token
        if is_unpadded or not bool(held["left_padding"].any()):
            return _Traits(chunk=held["chunk_size"])
        return None
    if maker == "packed_sequence_mask_function":
        return _Traits(documents=held["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":  # within a document, steps stay steps of 1
        traits = _read(held["mask_function"], is_unpadded)
        return None if traits is None or traits.chunk is not None else traits
    return None


def _both(one: _Traits, other: _Traits) -> _Traits | None:
    """What two functions say that must both agree."""
    if (one.chunk and other.chunk) or not (one.documents is None or other.documents is None):
        return None
    return _Traits(
        one.causal or other.causal,
        _least(one.left, other.left),
        _least(one.right, other.right),
        one.chunk or other.chunk,
        other.documents if one.documents is None else one.documents,
    )


def _least(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


# torch.compile shows no closures: there, mask functions are called with indices that note what is
# done to them.


class _Index:
    """The number of a query or of a key."""

    def __init__(self, kind: str, shift: int = 0) -> None:
        self.kind = kind
        self.shift = shift

    def __sub__(self, other: Any) -> _Index:
        if isinstance(other, _Index):
            return _Index("distance")
        return _Index(self.kind, self.shift - other)

    def __abs__(self) -> _Index:
        return _Index("span")

    def __le__(self, other: Any) -> _Said:
        if isinstance(other, _Index):  # key <= query
            is_causal = self.kind == "key" and other.kind == "query" and self.shift == other.shift
            return _Said(is_causal, causal=True)
        return _Said(self.kind == "span", left=other, right=other)

    def __gt__(self, other: Any) -> _Said:  # key > query - window
        is_sliding = isinstance(other, _Index) and self.kind == "key" and other.kind == "query"
        return _Said(is_sliding, left=-other.shift - 1 if is_sliding else 0)

    def __ge__(self, other: Any) -> _Said:
        return _Said(self.kind == "query" and other == 0)

    def new_ones(self, *args: Any, **named: Any) -> _Said:
        return _Said(True)


class _Said:
    """What a mask function said of its indices."""

    device = None

    def __init__(self, is_known: bool, **traits: Any) -> None:
        self.is_known = is_known
        self.traits = _Traits(**traits)

    def __and__(self, other: Any) -> _Said:
        both = _both(self.traits, other.traits)
        found = _Said(self.is_known and other.is_known and both is not None)
        if both is not None:
            found.traits = both
        return found

    def to(self, device: Any) -> _Said:
        return self


class _Rows(Tensor):
    """Numbers of queries; what a mask function joins by "or" gets a dtype other than bool."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is Tensor.new_zeros:
                return torch.zeros((), dtype=torch.int8, device=args[0].device)
            return function(*args, **(kwargs or {}))


AND_NAMES = ("and_mask", "and_masks.<locals>.and_mask")
"""What torch.compile calls what transformers' and_masks makes; the second one until torch 2.11."""


def _trace(
    function: Any, local_size: int | None, rows: tuple[Any, Any, Any] | None, packed: bool
) -> _Traits | None:
    """What a mask function says, under torch.compile.

    Args:
        local_size: transformers' word for the size of its window.
        rows: (batch, length, device) where documents may be packed; None elsewhere.
    """
    if function is masking_utils.causal_mask_function:
        return _Traits(causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return _Traits()
    if function.__name__ not in AND_NAMES:
        return None
    if rows is None:
        said = function(0, 0, _Index("query"), _Index("key")) if local_size is not None else None
        return said.traits if said is not None and said.is_known else None
    batch, length, device = rows
    number = torch.arange(length, device=device)
    row = torch.arange(batch, device=device)[:, None]
    is_next = function(row, 0, number[None, 1:].as_subclass(_Rows), number[None, :-1])
    if is_next.dtype != torch.bool:  # blocks that see themselves whole
        return None
    documents = None
    if packed:
        begins = torch.nn.functional.pad(~is_next.expand(batch, length - 1), (1, 0))
        documents = begins.cumsum(1)
    left = None if local_size is None else local_size - 1
    return _Traits(causal=True, left=left, documents=documents)


def _placed(
    traits: _Traits,
    sizes: tuple[Any, int, Any, Any],
    q_offset: Any,
    kv_offset: Any,
    attention_mask: Tensor | None,
    device: Any,
) -> StructuredMask | None:
    """The mask of a call; None where only a dense one will do."""
    batch, _, rows, keys = sizes
    is_placed = traits.causal or traits.left is not None or traits.chunk is not None
    start, key_start, end, used = q_offset - kv_offset, 0, None, None
    if not is_placed:
        start = 0
    elif isinstance(q_offset, Tensor):
        if not traits.causal or (traits.chunk is not None and kv_offset != 0):
            return None
        used = (start + rows).to(torch.int32).expand(batch)
    elif traits.causal:
        end = start + rows
        if end > keys:
            return None
        if end == keys:
            end = None
        elif rows == 1:  # the cache is longer, and will be the same at the next step
            used = torch.full((batch,), end, dtype=torch.int32, device=device)
            end = None
    elif start + rows != keys:
        return None
    if traits.chunk is not None and kv_offset != 0:
        start, key_start = q_offset, kv_offset
    last = keys if end is None else end
    if traits.causal and traits.left is not None and last <= traits.left + 1:
        traits = _Traits(traits.causal, None, traits.right, traits.chunk, traits.documents)
    pad, is_row = _padding(attention_mask, keys, kv_offset, last, rows)
    documents = packing = None
    if traits.documents is not None:
        ids = traits.documents.to(torch.int32)
        documents = (ids, ids)
    elif pad is not None and used is None and rows > MAX_ROWS:
        # Without causal order the keys may be another sequence than the queries, all of which see.
        is_first = start == key_start == 0 and rows == last and traits.chunk is None
        if is_row and not is_placed:
            packing = _packing(pad, rows)
        elif is_row and is_first and traits.causal:
            packing = _packing(pad[:, :last], None)
        documents = (pad.new_zeros((1, rows), dtype=torch.int32), pad.to(torch.int32) - 1)
        pad = None
    return StructuredMask(
        sizes,
        traits,
        start=start,
        key_start=key_start,
        keys=end,
        used=used,
        pad=pad,
        documents=documents,
        device=device,
        packing=packing,
    )


def _padding(
    attention_mask: Tensor | None, keys: Any, kv_offset: Any, last: Any, rows: Any
) -> tuple[Tensor | None, bool]:
    """Which keys exist, bool (batch, keys), None if all do; and is it known that those of each row
    follow each other?

    Outside of torch.compile that is looked at once for all layers, as transformers' own masks do,
    but not where few rows come one call after another.
    """
    if attention_mask is None:
        return None, False
    pad = attention_mask.to(torch.bool)
    if (missing := keys + kv_offset - pad.shape[1]) > 0:
        pad = torch.nn.functional.pad(pad, (0, missing))
    pad = pad[:, kv_offset : kv_offset + keys]
    if torch.compiler.is_compiling() or type(pad) is not Tensor or rows <= MAX_ROWS:
        return pad, False
    if pad.is_cuda and torch.cuda.is_current_stream_capturing():
        return pad, False
    seen = pad[:, :last]
    begins = seen[:, 1:].logical_and(~seen[:, :-1]).sum(1) + seen[:, 0]
    is_whole, is_row = torch.stack((seen.all(), (begins <= 1).all())).tolist()  # one wait
    return (None if is_whole else pad), is_row


def _packing(seen: Tensor, rows: int | None) -> dict[str, Tensor]:
    """Sequences in rows of all of the batch, as `attngen.attention` takes them.

    Args:
        seen: bool (batch, keys), each row with at most one run of True.
        rows: how many queries see them, all of them; None for those at the same places alone.
    """
    batch, length = seen.shape
    number = torch.arange(batch + 1, device=seen.device)
    begins = number * length
    begins[:-1] += seen.to(torch.int8).argmax(1)
    named = {"cu_seqlens_k": begins.to(torch.int32), "seqused_k": seen.sum(1, dtype=torch.int32)}
    if rows is None:
        named["cu_seqlens_q"], named["seqused_q"] = named["cu_seqlens_k"], named["seqused_k"]
    else:
        named["cu_seqlens_q"] = (number * rows).to(torch.int32)
    return named


def _says_nothing(mask: StructuredMask) -> bool:
    """Is it what a call without a mask means?"""
    traits = (mask.used, mask.pad, mask.documents, mask.chunk, *mask.window)
    if not all(each is None for each in traits):
        return False
    return not mask.causal or bool(mask.sizes[2] == 1 or mask.start == 0)
