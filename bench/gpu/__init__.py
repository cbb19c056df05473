"""What has to hold on a GPU, in nine minutes: ``python -m bench.gpu`` (``__main__.py``).

    facts        versions, the GPU's own rates
    parity       log π and gradients: CPU, GPU in float32, GPU in bfloat16
    kernels      attention and LM head by themselves
    trainer      steps at Qwen3-0.6B's shape: tokens/s, MFU, peak memory beside ``prime-rl plan``
    compiled     the same with ``trainer.compile``
    first_run    a run as a user with one GPU starts it, on_policy, resume, lora
    recipe       the recipe of Qwen3-0.6B, on random weights: reward, tokens/s, peak beside plan's
    engine       the embedded engine: tokens/s, and what sleeping frees
    broadcast    weights by NCCL, one member
    offload      moving the trainer's state to the host and back

Each stage is a function that returns figures, ``{name: number}`` or tables of them. Names end with
their unit (``device.UNITS``).
"""
