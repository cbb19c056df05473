"""Versions, and the GPU's own rates: by these the figures of later stages are judged."""

from __future__ import annotations

import platform
from importlib.util import find_spec
from inspect import signature

import torch
import transformers

from bench.gpu.device import Figures, Skip, clock, on_gpu

SIDE = 8192
"""Rows and columns of the matrices."""
BYTES = 2**30
"""Of a copy."""


def facts() -> Figures:
    """Versions; TFLOP/s of a product in bfloat16; GB/s of copies on the GPU and to the host."""
    if not on_gpu():
        raise Skip("torch sees no GPU")
    properties = torch.cuda.get_device_properties(0)
    figures: Figures = {
        "gpu": properties.name,
        "gpu_gib": properties.total_memory / 2**30,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "triton": find_spec("triton") is not None,
        "liger_kernel": find_spec("liger_kernel") is not None,
        "flash_attention_3": find_spec("flash_attn_interface") is not None,
        "varlen_parameters": varlen_parameters(),
    }

    left = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(left)
    seconds = clock(lambda: torch.mm(left, left, out=out), 20)
    figures["product_tflops"] = 2 * SIDE**3 / seconds / 1e12

    source = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # A copy on the GPU reads and writes.
    figures["copy_gb_per_s"] = 2 * BYTES / clock(lambda: target.copy_(source), 20) / 1e9

    pageable = torch.empty(BYTES, dtype=torch.uint8)
    pinned = torch.empty(BYTES, dtype=torch.uint8, pin_memory=True)
    for name, host in (("pageable", pageable), ("pinned", pinned)):
        seconds = clock(lambda host=host: host.copy_(source), 4)  # type: ignore[misc]
        figures[f"to_{name}_host_gb_per_s"] = BYTES / seconds / 1e9

    return figures


def varlen_parameters() -> str:
    """Those of torch's varlen attention."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return "absent"
    return " ".join(signature(varlen_attn).parameters)
