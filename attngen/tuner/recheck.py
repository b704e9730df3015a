"""Does the compiler that runs here agree with a config that another one, or another GPU, chose?

A stored config of another Triton, of other templates or of another device is used only after this.
It compiles what the call needs anyway, in this process, so that it costs nothing where it agrees.
"""

from __future__ import annotations

from attngen.config import KernelConfig
from attngen.gpu import GpuInfo
from attngen.kernel import explained, kernel
from attngen.render import direction_of
from attngen.spec import AttentionSpec
from attngen.tuner import case
from attngen.tuner.binary import facts_of, is_serialised
from attngen.tuner.static_check import ANY_SIZES, Compiled, KernelFacts, objection


def disagreements(spec: AttentionSpec, config: KernelConfig, gpu: GpuInfo) -> list[str]:
    """Why a config does not serve a spec on this process's GPU; empty if it does."""
    backward = direction_of(config) == "bwd"
    inputs = case.make(spec, ANY_SIZES, "meta", backward=backward)
    run = kernel(spec, config, False)
    try:
        plan = run.module.plan(*inputs.tensors(config), **inputs.numbers)
        for jit, grid, arguments, constants in plan:
            compiled = jit.warmup(*arguments, grid=grid, **constants)
            facts = facts_of(jit.__name__, compiled)
            if config.lowering == "hopper":
                facts["serialised_wgmma"] = is_serialised(compiled.asm["ptx"], gpu.capability)
            found = objection(Compiled(config, (KernelFacts(**facts),)), gpu)
            if found is not None:
                return [found.reason]
    except Exception as error:  # whatever it is, the default config is not this one
        return [str(explained(error, run.path, spec))]
    return []
