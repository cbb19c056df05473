"""Compiles each Triton kernel for a GPU of compute capability 9.0 (Hopper), without one, and prints
its name if machine code came out. For ``test_triton_kernels.py``."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from prime_rl_kernels import triton_kernels

HOPPER = GPUTarget("cuda", 90, 32)
HALF = "*bf16"
FLOAT = "*fp32"
HEAD = {
    "temperatures": FLOAT,
    "labels": "*i64",
    "first": "i32",
    "width": "i32",
    "num_labels": "i32",
    "logits": FLOAT,
}
SUMS = dict.fromkeys(("peak", "total", "moment", "chosen"), FLOAT)
GRADIENTS = dict.fromkeys(("log_normalizers", "grad", "entropies", "entropy_grad"), FLOAT)
NORM = {"x": HALF, "weight": HALF, "scale": FLOAT, "num_rows": "i32", "size": "i32"}
STRIDES = [f"{name}_{part}" for name in "xy" for part in ("batch", "head", "token")]
ROTATE = {
    **dict.fromkeys(("x", "y", "cos", "sin"), HALF),
    **dict.fromkeys((*STRIDES, "num_tokens", "num_heads", "half", "cos_batch"), "i32"),
}
GATES = dict.fromkeys(("gate", "up", "y", "grad", "of_gate", "of_up"), HALF) | {"size": "i32"}

CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "rms_norm": (
        triton_kernels.rms_norm,
        NORM | {"y": HALF, "eps": "fp32"},
        {"ROWS": 4, "SIZE": 1024},
    ),
    "rms_norm_backward": (
        triton_kernels.rms_norm_backward,
        NORM | {"grad": HALF, "of_x": HALF, "of_weight": FLOAT, "num_tiles": "i32"},
        {"ROWS": 32, "SIZE": 128},
    ),
    "rotate": (
        triton_kernels.rotate,
        ROTATE,
        {"BACKWARD": False, "HEADS": 16, "HALF": 64},
    ),
    "rotate_backward": (
        triton_kernels.rotate,
        ROTATE,
        {"BACKWARD": True, "HEADS": 8, "HALF": 64},
    ),
    "swiglu": (triton_kernels.swiglu, GATES, {"BLOCK": 1024}),
    "swiglu_backward": (triton_kernels.swiglu_backward, GATES, {"BLOCK": 1024}),
    "fold_logits": (
        triton_kernels.fold_logits,
        HEAD | SUMS | {"weights": FLOAT},
        {"HAS_TEMPERATURES": True, "WRITES": False, "BLOCK": 1024},
    ),
    "fold_logits_frozen": (
        triton_kernels.fold_logits,
        HEAD | SUMS | {"weights": HALF},
        {"HAS_TEMPERATURES": False, "WRITES": True, "BLOCK": 1024},
    ),
    "logit_gradients": (
        triton_kernels.logit_gradients,
        HEAD | GRADIENTS | {"of_logits": HALF},
        {"HAS_TEMPERATURES": True, "HAS_ENTROPIES": False, "BLOCK": 1024},
    ),
    "logit_gradients_entropies": (
        triton_kernels.logit_gradients,
        HEAD | GRADIENTS | {"of_logits": HALF},
        {"HAS_TEMPERATURES": False, "HAS_ENTROPIES": True, "BLOCK": 1024},
    ),
}


def main() -> None:
    for name, (kernel, types, constants) in CASES.items():
        signature = {
            each: "constexpr" if each in constants else types[each] for each in kernel.arg_names
        }
        source = triton.compiler.ASTSource(kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=HOPPER)
        if compiled.asm["cubin"] and ".target sm_90" in compiled.asm["ptx"]:
            print(name)


if __name__ == "__main__":
    main()
