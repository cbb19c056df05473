"""Versions of the policy's weights between the trainer and the engines.

    trainer       <run>/broadcasts/step_7/model.safetensors, then STABLE   version 7, as files
                  <run>/broadcasts/step_7/MEMORY, then STABLE     version 7 waits in its memory
    orchestrator  newest_version -> the engines load the files, or the transport delivers

``versions`` is for both sides and imports no torch; ``tensors`` is for processes with torch. The
trainer's ranks publish together (``prime_rl.trainer.publish``). Transports other than files
implement the contract ``prime_rl.plugins.weight_transports``.
"""
