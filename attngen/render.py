"""`(spec, config) -> text`: a pure function, with no clock, device or environment in the text."""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import replace

import jinja2

from attngen import hopper, hopper_decode
from attngen.config import BwdConfig, FwdConfig, KernelConfig
from attngen.decode import DecodeConfig
from attngen.head_dim import Part
from attngen.hopper import HopperBwdConfig, HopperFwdConfig
from attngen.hopper_decode import HopperDecodeConfig
from attngen.paths import data_dir
from attngen.score_nodes import FUNCTIONS
from attngen.spec import AttentionSpec
from attngen.template_spec import TemplateSpec
from attngen.workload import Direction

TEXT_VERSION = "0.1"


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_dir("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["named"] = _named
    environment.filters["folded"] = _folded
    environment.filters["chomp"] = lambda text: text.removesuffix("\n")
    return environment


def _named(parts: tuple[Part, ...], name: str, form: str = "{}", joined: str = ", ") -> str:
    """The variables of a tiled dim: `acc`, or `acc0, acc1`."""
    return joined.join(form.format(name + part.suffix) for part in parts)


def _folded(line: str, indent: int, width: int = 88) -> str:
    """A list, broken after commas, and functions in it after semicolons, where it would pass
    `width`."""
    lines = [""]
    for item in re.split("(?<=[,;])", f"{line},"):
        if lines[-1] and len(lines[-1]) + len(item) > width + 1:
            lines.append("")
        lines[-1] += item
    return f"\n{' ' * indent}".join(lines).removesuffix(",")


def direction_of(config: KernelConfig) -> Direction:
    """Which direction a config belongs to."""
    return config.direction


def render(spec: AttentionSpec, config: KernelConfig, *, frozen: bool = False) -> str:
    """The text of the kernel file of a spec and a config. Sees only `spec.text`.

    Args:
        frozen: a forward by pointers whose float arguments may come as float64, as
            AOTInductor passes them.
    """
    direction = direction_of(config)
    text = spec.served_as(direction).text
    template = _environment().get_template(f"{direction}.{config.lowering}.py.jinja")
    return template.render(
        spec=TemplateSpec(text),
        config=config,
        frozen=frozen,
        direction=direction,
        title=title(text, config),
        version=TEXT_VERSION,
    )


def environment() -> jinja2.Environment:
    """What every template of this folder is rendered in."""
    return _environment()


def title(spec: AttentionSpec, config: KernelConfig) -> str:
    """One line that says what the kernel computes."""
    dims = f"head_dim {spec.head_dim}"
    if spec.head_dim_v != spec.head_dim:
        dims += f"/{spec.head_dim_v}"
    dtype = f"{spec.dtype} by {spec.fp8_scale}" if spec.is_fp8 else spec.dtype
    traits = [dtype, dims]
    traits += ["causal"] if spec.is_causal else []
    traits += ["window"] if spec.has_window_left or spec.has_window_right else []
    traits += ["chunked"] if spec.has_chunk else []
    masks = {"prefix": spec.prefix_lm, "documents": spec.documents, "tree": spec.tree_mask}
    traits += [name for name, is_on in masks.items() if is_on]
    traits += ["packed"] if spec.layout == "thd" else []
    traits += ["paged"] if spec.paged else ["lengths of keys"] if spec.key_lengths else []
    traits += ["v in k"] if spec.shared_kv else []
    traits += [f"{spec.kv_dtype} cache by {spec.kv_scale}"] if spec.is_quantized else []
    traits += ["softcap"] if spec.has_softcap else []
    terms = {"mask": spec.attn_mask, "bias": spec.bias, "ALiBi": spec.alibi, "sinks": spec.sinks}
    traits += [name for name, is_on in terms.items() if is_on]
    traits += [name for name in FUNCTIONS if getattr(spec, name)]
    traits += ["block map"] if spec.block_map and config.direction != "map" else []
    traits += ["dropout"] if spec.has_dropout else []
    traits += ["side outputs"] if spec.aux else []
    traits += ["for Hopper" if config.lowering == "hopper" else f"tiles by {config.tiles}"]
    words = {
        "fwd": "forward",
        "bwd": "backward",
        "jvp": "with tangents",
        "map": "block map",
        "decode": "decode",
    }
    what = words[direction_of(config)]
    return f"Attention {what}: {', '.join(traits)}."


@functools.lru_cache(maxsize=256)
def template_hash(spec: AttentionSpec, direction: Direction, arch: str) -> str:
    """Hash of every text that may serve the spec on a device of this arch, with the tunable
    constants held fixed.

    A tuning record carries it: the hash changes if and only if a kernel's text does, so that the
    file's header and its check against PyTorch are left out.
    """
    digest = hashlib.sha256()
    variants = structural_variants(direction)
    if spec.is_packed:  # has no descriptors
        variants = [config for config in variants if config.tiles == "pointer"]
    if arch == hopper.ARCH and direction != "decode":
        served = not hopper.unserved_anywhere(spec)
        variants += hopper_variants(spec, direction) if served else []
    if arch == hopper.ARCH and direction == "decode":
        variants += [] if hopper_decode.unserved_anywhere(spec) else [HopperDecodeConfig()]
    for config in variants:
        _, _, body = render(spec, config).split('"""', 2)
        kernels, _, _ = body.partition("\ndef reference(")
        digest.update(kernels.encode())
    return digest.hexdigest()[:16]


def structural_variants(direction: Direction) -> list[KernelConfig]:
    """One config for each text of the portable lowering that a spec can have in a direction."""
    if direction == "decode":
        one = DecodeConfig(block_m=16, block_n=64, num_warps=4, num_stages=2)
        return [one, replace(one, merge="last")]
    if direction == "fwd":
        return [
            FwdConfig(tiles=tiles, block_m=64, block_n=64, num_warps=4, num_stages=2)
            for tiles in ("pointer", "descriptor")
        ]
    return [
        BwdConfig(tiles=tiles, dq=dq, block_m=64, block_n=64, num_warps=4, num_stages=2)
        for tiles in ("pointer", "descriptor")
        for dq in ("kernel", "atomic")
    ]


def hopper_variants(spec: AttentionSpec, direction: Direction) -> list[KernelConfig]:
    """The same of the hopper lowering, for a spec that it serves."""
    if direction == "fwd":
        found: list[KernelConfig] = [HopperFwdConfig(consumers=2), HopperFwdConfig(consumers=3)]
        if spec.is_fp8:
            quiet = HopperFwdConfig(overlap=False, turns=True)
            found += [HopperFwdConfig(exp_polynomial=1)]
            found += [replace(quiet, turn_ends=end) for end in ("scores", "products")]
            found += [replace(quiet, late_sums=True), replace(quiet, fences=True)]
            found += [replace(quiet, mask_loop=True)] if spec.has_positions else []
        return found
    atomic = [HopperBwdConfig(dq="atomic")] if hopper.adds_dq(spec) else []
    return [HopperBwdConfig(dq="kernel"), *atomic]
