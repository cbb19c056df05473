"""From the orchestrator to the trainer: micro batches as binary columns. Never a pickle."""

from prime_rl.wire.micro_batch import MicroBatch as MicroBatch
from prime_rl.wire.micro_batch import decode_batch as decode_batch
from prime_rl.wire.micro_batch import encode_batch as encode_batch
