"""What other frameworks call our keys: upstream prime-rl, TRL, verl, OpenRLHF, Hugging Face.

One table serves ``prime-rl migrate`` and every error about an unknown key.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from prime_rl.config.base import PluginTable
from prime_rl.config.explain import UNKNOWN, fits
from prime_rl.config.run import RunConfig
from prime_rl.registry.offers import bringer


class Foreign(NamedTuple):
    """Where a key of another framework is in our config, and what differs."""

    ours: str | None
    """None: it has no counterpart, and the note says why or what to do."""
    note: str = ""


DROPOUT = "the trainer has no dropout: tokens are sampled without it"
ROUTER = "the run spreads its requests over the replicas by itself"
DISAGGREGATED = "set inference.vllm.prefill_engines: prompts are computed on GPUs of their own"
OFFLOAD = 'trainer.optim.type = "adamw_offload" keeps the moments of AdamW in host memory'
ONE_DATA_SET = "[sft] trains on one data set; join them before"
PLACES = "set deployment.trainer_gpus and deployment.inference_gpus, or leave both to the defaults"
REWARDS = "rewards are part of an environment: orchestrator.train.env"
_BEAT = "url_var names a variable with a URL that holds a secret"
FIRST = "an evaluation takes the first examples"
TOKENS = "the run always sends and receives tokens, by its renderer"
FROM_DATA = "a run on a data set alone is [sft], of prime-rl sft: docs/sft.md"
ONE_CKPT = "one [ckpt] holds the state of trainer and orchestrator"
DATA = "an environment brings its data: orchestrator.train.env"

PRIME_RL: dict[str, Foreign] = {
    # The whole run.
    "clean_output_dir": Foreign(None, "a run directory is never reused; give another run.name"),
    "clean": Foreign(None, "a run directory is never reused; delete it, or give another run.name"),
    "resume.**": Foreign(None, "on the command line: prime-rl run CONFIG --resume [STEP|DIR]"),
    "run.dir": Foreign("run.name"),
    "bench.**": Foreign(None, "prime-rl plan estimates a run"),
    "slurm.**": Foreign(None, "migrate writes an sbatch file from this table"),
    "tokenizer.**": Foreign(None, "the tokenizer is that of model.name"),
    "monitors.prime.**": Foreign(None, "the platform of upstream; use monitors.wandb"),
    "monitors.wandb.shared": Foreign(None, "one W&B run has the metrics of all processes"),
    "monitors.wandb.offline": Foreign("monitors.wandb.mode", 'true is mode = "offline"'),
    "wandb.project": Foreign("monitors.wandb.project"),
    "wandb.name": Foreign("monitors.wandb.name"),
    "wandb.entity": Foreign("monitors.wandb.entity"),
    "wandb.group": Foreign("monitors.wandb.group"),
    "wandb.tags": Foreign("monitors.wandb.tags"),
    "wandb.offline": Foreign("monitors.wandb.mode", 'true is mode = "offline"'),
    "wandb.log_extras.**": Foreign(None, "monitors.wandb.table_interval and table_rows"),
    "log.vf_level": Foreign("log.level"),
    "log.interval": Foreign(None, "monitors.file.interval sets the steps between full lines"),
    "log.log_data": Foreign(None, "trainer.token_export writes what was trained"),
    "log.ranks_filter": Foreign(None, "each rank has a log of its own"),
    "log.file": Foreign(None, "logs are always files, in <run>/logs"),
    "max_async_level": Foreign("orchestrator.max_off_policy_steps"),
    "async_level": Foreign("orchestrator.max_off_policy_steps"),
    "model.seq_len": Foreign("seq_len"),
    "model.vlm.**": Foreign(None, "multimodal models are not supported"),
    "model.compile": Foreign("trainer.compile"),
    "model.trust_remote_code": Foreign(None, "code of a model's repository is never run"),
    "model.impl": Foreign(None, "models are those of transformers"),
    "model.attn": Foreign(None, "trainer.attention selects the kernel, by default the fastest"),
    "ckpt.resume_step": Foreign(None, "on the command line: prime-rl run CONFIG --resume STEP"),
    "ckpt.output_dir": Foreign(None, "checkpoints are in the run directory: output_dir"),
    "ckpt.skip_progress": Foreign(None, "prime-rl run --resume DIR in a new run starts at step 1"),
    "ckpt.skip_scheduler": Foreign(None, "the schedule follows the step"),
    "ckpt.skip_dataloader": Foreign(None, "the sampler's state is part of the checkpoint"),
    "ckpt.skip_optimizer": Foreign(None, "a resumed run always loads the optimizer"),
    "ckpt.weights.**": Foreign(None, "a checkpoint has the weights as safetensors"),
    "ckpt.weights_only": Foreign(None, "the last step exports the model to <run>/weights"),
    # GPUs and machines.
    "deployment.type": Foreign(
        None, "several machines: launcher.type and deployment.trainer_nodes"
    ),
    "deployment.gpus_per_node": Foreign(None, "launcher ray finds the GPUs of each node"),
    "deployment.num_train_gpus": Foreign("trainer.num_ranks"),
    "deployment.num_gpus": Foreign("trainer.num_ranks"),
    "deployment.num_nodes": Foreign("deployment.trainer_nodes"),
    "deployment.num_infer_gpus": Foreign(
        "inference.replicas", "one engine for each tensor_parallel_size GPUs"
    ),
    "deployment.num_train_nodes": Foreign("deployment.trainer_nodes"),
    "deployment.num_infer_nodes": Foreign(
        None, "the launcher places the engines; inference.replicas is their number"
    ),
    "deployment.num_infer_replicas": Foreign("inference.replicas"),
    "deployment.nodes_per_fsdp_group": Foreign(
        "trainer.dp_replicate", "the number of groups of ranks, each of which shards one copy"
    ),
    "deployment.**": Foreign(None, PLACES),
    "trainer_gpu_ids": Foreign("deployment.trainer_gpus"),
    "inference_gpu_ids": Foreign("deployment.inference_gpus"),
    "teacher_gpu_ids": Foreign(None, "start a teacher with prime-rl serve, on GPUs of its own"),
    # Engines.
    "inference.server.host": Foreign("inference.host"),
    "inference.server.port": Foreign("inference.port"),
    "inference.server.liveness_timeout_seconds": Foreign("inference.hang_timeout"),
    "inference.vllm.model": Foreign(None, "the engines serve model.name"),
    "inference.vllm.max_model_len": Foreign("inference.max_model_len"),
    "inference.vllm.data_parallel_size": Foreign(
        "inference.replicas", "each replica is an engine of its own"
    ),
    "inference.vllm.enable_lora": Foreign(None, "set by the run if trainer.lora is there"),
    "inference.vllm.enable_return_routed_experts": Foreign(None, "set by trainer.router_replay"),
    "inference.vllm.quantization": Foreign(None, "the policy is sampled in full precision"),
    "inference.vllm.reasoning_parser": Foreign(None, "the renderer parses replies"),
    "inference.vllm.tool_call_parser": Foreign(None, "the renderer parses replies"),
    "inference.vllm.enable_auto_tool_choice": Foreign(None, "the renderer parses replies"),
    "inference.vllm.chat_template": Foreign(None, "the renderer writes prompts"),
    "inference.model.name": Foreign("model.name"),
    "inference.model.max_model_len": Foreign("inference.max_model_len"),
    "inference.model.dtype": Foreign("inference.vllm.dtype"),
    "inference.model.enforce_eager": Foreign("inference.vllm.enforce_eager"),
    "inference.model.**": Foreign(None, "vLLM's arguments go into [inference.vllm]"),
    "inference.parallel.tp": Foreign("inference.vllm.tensor_parallel_size"),
    "inference.parallel.dp": Foreign("inference.replicas"),
    "inference.gpu_memory_utilization": Foreign("inference.vllm.gpu_memory_utilization"),
    "inference.enable_lora": Foreign(None, "set by the run if trainer.lora is there"),
    "inference.weight_broadcast.type": Foreign("weight_broadcast.type"),
    "inference.use_deep_gemm": Foreign(None, "export VLLM_USE_DEEP_GEMM=1"),
    "inference.enable_fp32_lm_head": Foreign(
        None, 'inference.vllm.dtype = "float32" is the nearest'
    ),
    "inference.deployment.**": Foreign(None, DISAGGREGATED),
    "inference.router.**": Foreign(None, ROUTER),
    "inference.kv_cache_offload.**": Foreign(None, "set inference.vllm.kv_offloading_size (GiB)"),
    # Weights and batches on their way.
    "weight_broadcast.host": Foreign(None, "the address comes from the launcher"),
    "weight_broadcast.port": Foreign(None, "a free port is chosen"),
    "weight_broadcast.quantize_in_weight_transfer": Foreign(
        "trainer.publish_dtype", 'true is "bfloat16"'
    ),
    "weight_broadcast.inference_world_size": Foreign(None, "the engines say how many they are"),
    "weight_broadcast.save_sharded": Foreign(None, "all ranks write one file"),
    "weight_broadcast.save_format": Foreign(None, "weights are safetensors"),
    "weight_broadcast.session_id": Foreign(None, "of the transport nixl, which is not there"),
    # The trainer.
    "trainer.model.lora.rank": Foreign("trainer.lora.rank"),
    "trainer.model.lora.alpha": Foreign("trainer.lora.alpha"),
    "trainer.model.lora.dropout": Foreign(None, DROPOUT),
    "trainer.model.lora.target_modules": Foreign("trainer.lora.target_modules"),
    "trainer.model.lora.modules_to_save": Foreign("trainer.lora.modules_to_save"),
    "trainer.model.lora": Foreign("trainer.lora"),
    "trainer.model.ac.freq": Foreign("trainer.activation_checkpointing"),
    "trainer.model.ac.mode": Foreign("trainer.activation_checkpointing", "every n-th block"),
    "trainer.model.ac.targets": Foreign(None, "activation_checkpointing takes whole blocks"),
    "trainer.model.ac": Foreign("trainer.activation_checkpointing", "{} is 1"),
    "trainer.model.ac_offloading.**": Foreign(None, "activations are never moved to the host"),
    "trainer.model.compile": Foreign("trainer.compile"),
    "trainer.model.compile.fullgraph": Foreign("trainer.compile"),
    "trainer.model.name": Foreign("model.name"),
    "trainer.model.seq_len": Foreign("trainer.micro_batch_tokens"),
    "trainer.model.attn": Foreign(
        None, "trainer.attention selects the kernel, the fastest if left"
    ),
    "trainer.model.impl": Foreign(None, "models are those of transformers"),
    "trainer.model.dp_replicate": Foreign("trainer.dp_replicate"),
    "trainer.model.ep": Foreign("trainer.expert_parallel"),
    "trainer.model.ep_comm_backend": Foreign(None, "tokens travel by all-to-all of NCCL"),
    "trainer.model.cp": Foreign("trainer.context_parallel"),
    "trainer.model.cp_style": Foreign(None, "ranks of a row exchange tokens for heads (Ulysses)"),
    "trainer.model.fused_lm_head_token_chunk_size": Foreign(
        None, "the kernel knows the best number for the device"
    ),
    "trainer.model.fused_lm_head_chunk_size": Foreign(
        None, "the kernel knows the best number for the device"
    ),
    "trainer.model.optim_cpu_offload": Foreign(None, OFFLOAD),
    "trainer.model.full_offload": Foreign(None, OFFLOAD),
    "trainer.model.fsdp_cpu_offload": Foreign(None, OFFLOAD),
    "trainer.model.optimization_dtype": Foreign(None, "weights that train are float32"),
    "trainer.model.reduce_dtype": Foreign("trainer.reduce_dtype"),
    "trainer.model.quantization.**": Foreign(None, "the trainer computes in trainer.dtype"),
    "trainer.model.reshard_after_forward": Foreign("trainer.reshard_after_forward"),
    "trainer.model.debug.**": Foreign(None, "make a small model instead: model.name"),
    "trainer.model.trust_remote_code": Foreign(None, "code of a model's repository is never run"),
    "trainer.model.**": Foreign(None, "[trainer] has the keys of the model that trains"),
    "trainer.optim.betas1": Foreign("trainer.optim.beta1"),
    "trainer.optim.betas2": Foreign("trainer.optim.beta2"),
    "trainer.optim.mu": Foreign("trainer.optim.momentum"),
    "trainer.loss.ipo_mask_low": Foreign("trainer.loss.dppo_mask_low"),
    "trainer.loss.ipo_mask_high": Foreign("trainer.loss.dppo_mask_high"),
    "trainer.loss.teacher_tau": Foreign(None, 'orchestrator.algo.type = "opd" has a teacher'),
    "trainer.ckpt.interval": Foreign("ckpt.interval"),
    "trainer.ckpt.keep_last": Foreign("ckpt.keep_last"),
    "trainer.ckpt.keep_interval": Foreign("ckpt.keep_interval"),
    "trainer.ckpt.**": Foreign(None, ONE_CKPT),
    "trainer.max_steps": Foreign("max_steps"),
    "trainer.output_dir": Foreign("output_dir"),
    "trainer.max_async_level": Foreign("orchestrator.max_off_policy_steps"),
    "trainer.dist_timeout_seconds": Foreign("recovery.hang_timeout"),
    "trainer.enable_router_replay": Foreign("trainer.router_replay"),
    "trainer.enable_token_export": Foreign("trainer.token_export.enabled"),
    "trainer.matmul_precision": Foreign(None, "torch's default, unless trainer.dtype is set"),
    "trainer.log.level": Foreign("log.level"),
    "trainer.log.json_logging": Foreign("log.json_logging"),
    "trainer.log.**": Foreign(None, "one [log] is for all processes"),
    "trainer.wandb.**": Foreign(None, "one monitor has the metrics of all: [monitors.wandb]"),
    "trainer.monitors.**": Foreign(None, "one monitor has the metrics of all: [monitors]"),
    "trainer.weight_broadcast.type": Foreign("weight_broadcast.type"),
    "trainer.weight_broadcast.**": Foreign(None, "one [weight_broadcast] is for both sides"),
    "trainer.rollout_transport.type": Foreign("rollout_transport.type"),
    "trainer.rollout_transport.**": Foreign(None, "one [rollout_transport] is for both sides"),
    "trainer.gc.**": Foreign(None, "Python's garbage collector is left alone"),
    "trainer.heartbeat.url": Foreign("observers.heartbeat.url", _BEAT),
    "trainer.heartbeat.**": Foreign(None, "observers.heartbeat sends one from one place"),
    "trainer.metrics_server.**": Foreign(None, "monitors.prometheus has the metrics of all"),
    "trainer.data.**": Foreign(None, "prime-rl plan measures without rollouts"),
    "trainer.tokenizer.**": Foreign(None, "the tokenizer is that of model.name"),
    "trainer.trace_path": Foreign(None, "no profile is written"),
    "trainer.memory_profiler_path": Foreign(None, "no profile is written"),
    "trainer.bench.**": Foreign(None, "prime-rl plan estimates a run"),
    "trainer.broadcast_at_step_zero": Foreign(None, "engines start with the trainer's weights"),
    "trainer.max_concurrent_runs": Foreign(None, "a trainer belongs to one run"),
    # The orchestrator.
    "orchestrator.rollouts_per_example": Foreign("orchestrator.group_size"),
    "orchestrator.max_inflight_episodes": Foreign("orchestrator.max_inflight_rollouts"),
    "orchestrator.oversampling_factor": Foreign(
        None, "orchestrator.max_inflight_rollouts bounds the rollouts in flight"
    ),
    "orchestrator.use_token_client": Foreign(None, TOKENS),
    "orchestrator.use_renderer": Foreign(None, TOKENS),
    "orchestrator.use_sft_loss": Foreign(None, 'orchestrator.algo.type = "sft" has this loss'),
    "orchestrator.teacher_rollout_model.model.name": Foreign(
        "orchestrator.algo.sampling.source.name", "the teacher samples"
    ),
    "orchestrator.teacher_rollout_model.client.base_url": Foreign(
        "orchestrator.algo.sampling.source.base_url"
    ),
    "orchestrator.teacher_rollout_model.client.api_key_var": Foreign(
        "orchestrator.algo.sampling.source.api_key_var"
    ),
    "orchestrator.teacher_rollout_model.client.headers.**": Foreign(
        "orchestrator.algo.sampling.source.headers.**"
    ),
    "orchestrator.teacher_rollout_model.client.headers_from_env.**": Foreign(
        "orchestrator.algo.sampling.source.headers_from_env.**"
    ),
    "orchestrator.teacher_rollout_model.**": Foreign(
        None, "orchestrator.algo.sampling.source has the keys of a model that samples"
    ),
    "orchestrator.concurrency.max_inflight": Foreign("orchestrator.max_inflight_rollouts"),
    "orchestrator.concurrency.initial_inflight": Foreign(
        None, "the run starts with what the engines say that they can run"
    ),
    "orchestrator.concurrency.min_inflight": Foreign(None, "one group is always in flight"),
    "orchestrator.tasks_per_minute": Foreign(
        "orchestrator.train.env.tasks_per_minute", "of each env, in groups"
    ),
    "orchestrator.env_server_base_port": Foreign(None, "free ports are chosen"),
    "orchestrator.num_train_workers": Foreign(None, "the trainer says how many ranks it has"),
    "orchestrator.pad_to_multiple_of": Foreign(None, "rows are not padded"),
    "orchestrator.collect_inference_metrics": Foreign(None, "observers.engine_metrics always does"),
    "orchestrator.seq_len": Foreign("seq_len"),
    "orchestrator.max_steps": Foreign("max_steps"),
    "orchestrator.output_dir": Foreign("output_dir"),
    "orchestrator.seed": Foreign("seed"),
    "orchestrator.max_async_level": Foreign("orchestrator.max_off_policy_steps"),
    "orchestrator.strict_async_level": Foreign(None, "max_off_policy_steps is always kept"),
    "orchestrator.model.name": Foreign("model.name"),
    "orchestrator.model.lora.name": Foreign(None, "the engines name the adapter by its version"),
    "orchestrator.model.lora.rank": Foreign("trainer.lora.rank"),
    "orchestrator.model.lora.alpha": Foreign("trainer.lora.alpha"),
    "orchestrator.model.**": Foreign(None, "one [model] is for all processes"),
    "orchestrator.tokenizer.**": Foreign(None, "the tokenizer is that of model.name"),
    "orchestrator.log.level": Foreign("log.level"),
    "orchestrator.log.json_logging": Foreign("log.json_logging"),
    "orchestrator.log.**": Foreign(None, "one [log] is for all processes"),
    "orchestrator.wandb.**": Foreign(None, "one monitor has the metrics of all: [monitors.wandb]"),
    "orchestrator.monitors.**": Foreign(None, "one monitor has the metrics of all: [monitors]"),
    "orchestrator.ckpt.interval": Foreign("ckpt.interval"),
    "orchestrator.ckpt.keep_last": Foreign("ckpt.keep_last"),
    "orchestrator.ckpt.keep_interval": Foreign("ckpt.keep_interval"),
    "orchestrator.ckpt.**": Foreign(None, ONE_CKPT),
    "orchestrator.heartbeat.url": Foreign("observers.heartbeat.url", _BEAT),
    "orchestrator.heartbeat.**": Foreign(None, "observers.heartbeat sends one from one place"),
    "orchestrator.weight_broadcast.type": Foreign("weight_broadcast.type"),
    "orchestrator.weight_broadcast.**": Foreign(None, "one [weight_broadcast] is for both sides"),
    "orchestrator.rollout_transport.type": Foreign("rollout_transport.type"),
    "orchestrator.rollout_transport.**": Foreign(None, "one [rollout_transport] is for both sides"),
    "orchestrator.client.base_url": Foreign("inference.base_url"),
    "orchestrator.client.api_key_var": Foreign("inference.admin_key_var"),
    "orchestrator.client.wait_for_ready_timeout": Foreign("inference.ready_timeout"),
    "orchestrator.client.timeout": Foreign("inference.hang_timeout"),
    "orchestrator.client.headers.**": Foreign("inference.headers.**"),
    "orchestrator.client.headers_from_env.**": Foreign("inference.headers_from_env.**"),
    "orchestrator.client.**": Foreign(None, "[inference] has the keys of the engines"),
    "orchestrator.teacher.model.name": Foreign("orchestrator.algo.teacher.name"),
    "orchestrator.teacher.client.base_url": Foreign("orchestrator.algo.teacher.base_url"),
    "orchestrator.teacher.client.api_key_var": Foreign("orchestrator.algo.teacher.api_key_var"),
    "orchestrator.teacher.client.headers.**": Foreign("orchestrator.algo.teacher.headers.**"),
    "orchestrator.training_mode": Foreign(
        "orchestrator.algo.type", "rl is grpo; opd and sft have the same name"
    ),
    "orchestrator.advantage.type": Foreign(
        "orchestrator.algo.type", "an own function becomes an algorithm: docs/migrating.md"
    ),
    "orchestrator.advantage.length_penalty": Foreign("orchestrator.algo.length_penalty"),
    "orchestrator.advantage.**": Foreign(
        None, "an own function becomes an algorithm: docs/migrating.md"
    ),
    "orchestrator.algo.dataset.**": Foreign(None, FROM_DATA),
    "orchestrator.algo.length_penalty.num_output_tokens_weight": Foreign(
        "orchestrator.algo.length_penalty.output_weight"
    ),
    "orchestrator.algo.length_penalty.num_input_tokens_weight": Foreign(
        "orchestrator.algo.length_penalty.input_weight"
    ),
    "orchestrator.algo.length_penalty.num_turns_weight": Foreign(
        "orchestrator.algo.length_penalty.turns_weight"
    ),
    "orchestrator.pre_batch_filters.threshold": Foreign(
        "orchestrator.pre_batch_filters.ngram_threshold", "of the filter repetition"
    ),
    "orchestrator.post_batch_filters.threshold": Foreign(
        "orchestrator.post_batch_filters.ngram_threshold", "of the filter repetition"
    ),
    "orchestrator.filters.threshold": Foreign(
        "orchestrator.post_batch_filters.ngram_threshold", "of the filter repetition"
    ),
    "orchestrator.filters.**": Foreign("orchestrator.post_batch_filters.**"),
    "orchestrator.sampling.max_tokens": Foreign(
        "orchestrator.train.sampling.max_completion_tokens"
    ),
    "orchestrator.sampling.min_tokens": Foreign(None, "training needs the whole distribution"),
    "orchestrator.sampling.repetition_penalty": Foreign(
        None, "training needs the whole distribution"
    ),
    "orchestrator.sampling.seed": Foreign("seed"),
    "orchestrator.sampling.temp_scheduler.**": Foreign(None, "the temperature is constant"),
    "orchestrator.sampling.**": Foreign("orchestrator.train.sampling.**"),
    "orchestrator.train.filter_zero_advantages": Foreign(
        None, "the filter zero_advantage of post_batch_filters, which fills the batch again"
    ),
    "orchestrator.train.sampling.max_tokens": Foreign(
        "orchestrator.train.sampling.max_completion_tokens"
    ),
    "orchestrator.train.sampling.logprobs": Foreign(None, "training always asks for them"),
    "orchestrator.train.sampling.top_p": Foreign(None, "training needs the whole distribution"),
    "orchestrator.eval.sampling.max_tokens": Foreign(
        "orchestrator.eval.sampling.max_completion_tokens"
    ),
    "orchestrator.eval.sampling.reasoning_effort": Foreign(
        "orchestrator.eval.sampling.extra_body.reasoning_effort"
    ),
    "orchestrator.eval.sampling.min_tokens": Foreign(
        "orchestrator.eval.sampling.extra_body.min_tokens"
    ),
    "orchestrator.eval.sampling.repetition_penalty": Foreign(
        "orchestrator.eval.sampling.extra_body.repetition_penalty"
    ),
    # Environments: of both train and eval.
    "orchestrator.env.**": Foreign("orchestrator.train.env.**"),
    "orchestrator.environment.**": Foreign("orchestrator.train.env.**"),
    "orchestrator.*.source.env.taskset.id": Foreign("orchestrator.*.env.id"),
    "orchestrator.*.source.env.taskset.**": Foreign("orchestrator.*.env.args.**"),
    "orchestrator.*.source.env.agent.harness.**": Foreign("orchestrator.*.env.harness.**"),
    "orchestrator.*.source.env.agent.runtime.type": Foreign(
        "orchestrator.*.env.args.agent.runtime.type"
    ),
    "orchestrator.*.source.env.agent.max_turns": Foreign("orchestrator.*.env.max_turns"),
    "orchestrator.*.source.env.agent.timeout.rollout": Foreign("orchestrator.*.env.timeout"),
    "orchestrator.*.source.env.agent.timeout": Foreign("orchestrator.*.env.timeout"),
    "orchestrator.*.source.env.agent.sampling.**": Foreign(
        "orchestrator.*.env.sampling.**", "of the env: the policy plays the agent"
    ),
    "orchestrator.*.source.env.id": Foreign("orchestrator.*.env.args.id"),
    "orchestrator.*.source.env.timeout.rollout": Foreign("orchestrator.*.env.timeout"),
    "orchestrator.*.source.env.timeout.episode": Foreign("orchestrator.*.env.timeout"),
    "orchestrator.*.source.env.timeout": Foreign("orchestrator.*.env.timeout"),
    "orchestrator.*.source.env.**": Foreign("orchestrator.*.env.args.**"),
    "orchestrator.*.source.serve.address": Foreign("orchestrator.*.env.address"),
    "orchestrator.*.source.serve.num_workers": Foreign("orchestrator.*.env.env_workers"),
    "orchestrator.*.source.serve.**": Foreign(None, "env_workers starts the workers of an env"),
    "orchestrator.*.source.num_workers": Foreign("orchestrator.*.env.env_workers"),
    "orchestrator.*.source.curriculum.sampler.type": Foreign(
        "orchestrator.sampler.type", "one sampler is for all envs"
    ),
    "orchestrator.*.source.curriculum.**": Foreign(
        None,
        "its gates reject groups: the sampler difficulty_pools, or the filter zero_advantage with "
        "enforce = true. weight and opens of [[orchestrator.train.env]] change the mix of envs",
    ),
    "orchestrator.eval.source.tasks_per_minute": Foreign(
        None, "an evaluation is limited by the places in flight"
    ),
    "orchestrator.train.source.tasks_per_minute": Foreign(
        "orchestrator.train.env.tasks_per_minute", "in groups"
    ),
    "orchestrator.*.source.algo.dataset.**": Foreign(None, FROM_DATA),
    "orchestrator.eval.source.select.limit": Foreign("orchestrator.eval.env.num_examples"),
    "orchestrator.eval.source.select.**": Foreign(None, FIRST),
    "orchestrator.*.source.algo.length_penalty.num_output_tokens_weight": Foreign(
        "orchestrator.*.env.algo.length_penalty.output_weight"
    ),
    "orchestrator.*.source.algo.length_penalty.num_input_tokens_weight": Foreign(
        "orchestrator.*.env.algo.length_penalty.input_weight"
    ),
    "orchestrator.*.source.algo.length_penalty.num_turns_weight": Foreign(
        "orchestrator.*.env.algo.length_penalty.turns_weight"
    ),
    "orchestrator.eval.source.ratio": Foreign(None, "every held-out env is evaluated"),
    "orchestrator.eval.source.num_examples": Foreign("orchestrator.eval.env.num_examples"),
    "orchestrator.*.source.**": Foreign("orchestrator.*.env.**"),
    "orchestrator.*.env.taskset.id": Foreign("orchestrator.*.env.id"),
    "orchestrator.*.env.taskset.**": Foreign("orchestrator.*.env.args.**"),
    "orchestrator.*.env.harness.runtime.type": Foreign(
        "orchestrator.*.env.args.agent.runtime.type"
    ),
    "orchestrator.*.env.harness.runtime.**": Foreign("orchestrator.*.env.args.agent.runtime.**"),
    "orchestrator.*.env.timeout.rollout": Foreign("orchestrator.*.env.timeout"),
    "orchestrator.*.env.timeout.episode": Foreign("orchestrator.*.env.timeout"),
    "orchestrator.*.env.algo.dataset.**": Foreign(None, FROM_DATA),
    "orchestrator.eval.env.select.limit": Foreign("orchestrator.eval.env.num_examples"),
    "orchestrator.eval.env.select.**": Foreign(None, FIRST),
    "orchestrator.*.env.extra_env_kwargs.**": Foreign("orchestrator.*.env.args.**"),
    "orchestrator.*.env.num_workers": Foreign("orchestrator.*.env.env_workers"),
    "orchestrator.*.env.rollouts_per_example": Foreign("orchestrator.*.env.group_size"),
    "orchestrator.eval.env.skip_first": Foreign(None, FIRST),
    "orchestrator.*.env.max_retries": Foreign(None, "a failed rollout counts as failed"),
    "orchestrator.eval.interval": Foreign("orchestrator.eval.env.interval", "of each env"),
    "orchestrator.eval.num_examples": Foreign("orchestrator.eval.env.num_examples", "of each env"),
    "orchestrator.eval.select.limit": Foreign("orchestrator.eval.env.num_examples", "of each env"),
    "orchestrator.eval.select.**": Foreign(None, FIRST),
    "orchestrator.eval.group_size": Foreign("orchestrator.eval.env.group_size", "of each env"),
    "orchestrator.eval.rollouts_per_example": Foreign(
        "orchestrator.eval.env.group_size", "of each env"
    ),
    "orchestrator.eval.client.**": Foreign(
        None, "prime-rl eval --base-url measures a model behind an endpoint"
    ),
    "orchestrator.eval.concurrency.**": Foreign(
        None, "orchestrator.max_inflight_rollouts bounds the rollouts in flight"
    ),
    "orchestrator.eval.eval_base_model": Foreign(
        "orchestrator.eval.skip_first_step", "the opposite"
    ),
    "orchestrator.eval.skip_eval_on_resume": Foreign(
        "orchestrator.eval.retrigger_on_resume", "the opposite"
    ),
    "orchestrator.eval.cancel_inflight_rollouts_on_eval": Foreign(
        None, "evaluations share the engines with training; max_hold_seconds bounds their delay"
    ),
    "orchestrator.val.**": Foreign(None, "use [[orchestrator.eval.env]]"),
    # Supervised fine-tuning.
    "data.name": Foreign("sft.data"),
    "data.source.dataset": Foreign("sft.data"),
    "data.source.subset": Foreign("sft.subset"),
    "data.source.split": Foreign("sft.split"),
    **dict.fromkeys(
        ("data.source.ratio", "data.source.weight", "data.source.probability"),
        Foreign(None, ONE_DATA_SET),
    ),
    "data.subsets": Foreign("sft.subset"),
    "data.splits": Foreign("sft.split"),
    "data.batch_size": Foreign(
        "sft.batch_size", "conversations here, rows of seq_len tokens in upstream"
    ),
    "data.seq_len": Foreign("seq_len", "the longest conversation; longer ones are cut"),
    "data.shuffle": Foreign("sft.shuffle"),
    "data.seed": Foreign("seed"),
    "data.loss_mask": Foreign("sft.roles"),
    "data.loss_mask.*": Foreign("sft.roles", "the roles whose tokens train, as a list"),
    "data.micro_batch_size": Foreign(None, "trainer.micro_batch_tokens is the size of a row"),
    "data.pack_function": Foreign(None, "conversations are packed end to end, without padding"),
    "data.probabilities": Foreign(None, ONE_DATA_SET),
    "data.stopping_strategy": Foreign(None, ONE_DATA_SET),
    "data.type": Foreign(None, "sft.data names the data set"),
    "val.interval": Foreign("sft.validate_every"),
    "val.data.name": Foreign("sft.validation"),
    "val.data.splits": Foreign("sft.validation_split"),
    "val.**": Foreign(None, "sft.validation is measured as a whole, after the last step too"),
    "data.fake.**": Foreign(None, "prime-rl plan measures without rollouts"),
    "trainer.loss_impl": Foreign(None, "trainer.fused_lm_head chooses how the loss is computed"),
}
"""Upstream prime-rl, with its states of May to August 2026. ``*`` is one name, ``**`` any number of
them; the numbers of list entries are left out. The first pattern that matches counts."""

VERL: dict[str, Foreign] = {
    "actor_rollout_ref.model.path": Foreign("model.name"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Foreign(
        "trainer.activation_checkpointing", "true is 1"
    ),
    "actor_rollout_ref.model.lora_rank": Foreign("trainer.lora.rank"),
    "actor_rollout_ref.model.lora_alpha": Foreign("trainer.lora.alpha"),
    "actor_rollout_ref.model.target_modules": Foreign("trainer.lora.target_modules"),
    "actor_rollout_ref.model.use_remove_padding": Foreign(None, "rows are packed, never padded"),
    "actor_rollout_ref.model.trust_remote_code": Foreign(
        None, "code of a model's repository is never run"
    ),
    "actor_rollout_ref.actor.optim.lr": Foreign("trainer.optim.lr"),
    "actor_rollout_ref.actor.optim.weight_decay": Foreign("trainer.optim.weight_decay"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": Foreign("trainer.scheduler.warmup_steps"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": Foreign(
        "trainer.scheduler.warmup_steps", "a number of steps"
    ),
    "actor_rollout_ref.actor.optim.warmup_style": Foreign("trainer.scheduler.type"),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": Foreign("trainer.scheduler.type"),
    "actor_rollout_ref.actor.optim.clip_grad": Foreign("trainer.optim.max_norm"),
    "actor_rollout_ref.actor.grad_clip": Foreign("trainer.optim.max_norm"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": Foreign(
        "trainer.minibatches", "data.train_batch_size / ppo_mini_batch_size"
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": Foreign(
        None, "trainer.micro_batch_tokens is the length of a packed row in tokens"
    ),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": Foreign("trainer.micro_batch_tokens"),
    "actor_rollout_ref.actor.use_dynamic_bsz": Foreign(None, "rows are always packed by tokens"),
    "actor_rollout_ref.actor.ppo_epochs": Foreign("trainer.epochs"),
    "actor_rollout_ref.actor.clip_ratio": Foreign(
        "trainer.loss.clip_eps_high", 'of trainer.loss.type = "ppo_clip", and clip_eps_low'
    ),
    "actor_rollout_ref.actor.clip_ratio_low": Foreign("trainer.loss.clip_eps_low"),
    "actor_rollout_ref.actor.clip_ratio_high": Foreign("trainer.loss.clip_eps_high"),
    "actor_rollout_ref.actor.clip_ratio_c": Foreign("trainer.loss.dual_clip"),
    "actor_rollout_ref.actor.entropy_coeff": Foreign(
        "orchestrator.algo.penalties.entropy_bonus", "of the algorithms of prime-rl-baselines"
    ),
    "actor_rollout_ref.actor.use_kl_loss": Foreign(
        None, "kl_loss_coef is the penalty, and is carried over only where this is true"
    ),
    "actor_rollout_ref.actor.kl_loss_coef": Foreign(
        "orchestrator.algo.penalties.kl_to_initial", "of the algorithms of prime-rl-baselines"
    ),
    "actor_rollout_ref.actor.kl_loss_type": Foreign(
        "trainer.losses.kl_to_initial.estimator", "low_var_kl is k3, kl is k1, mse is k2"
    ),
    "actor_rollout_ref.actor.loss_agg_mode": Foreign(
        "trainer.loss.normalize_by", "token-mean is tokens, seq-mean-token-mean is sequences"
    ),
    "actor_rollout_ref.actor.policy_loss.loss_mode": Foreign(
        "trainer.loss.type", "vanilla is ppo_clip, geo_mean is gmpo"
    ),
    "actor_rollout_ref.actor.policy_loss.**": Foreign(
        None, "[trainer.loss] has the keys of the loss"
    ),
    "actor_rollout_ref.actor.megatron.**": Foreign(
        None, "FSDP2 shards the model; trainer.context_parallel and trainer.expert_parallel"
    ),
    "actor_rollout_ref.actor.shuffle": Foreign(
        None, "the first pass takes the minibatches in order, later ones shuffle them"
    ),
    "actor_rollout_ref.actor.fsdp_config.**": Foreign(
        None, "trainer.dp_replicate is the key of FSDP"
    ),
    "actor_rollout_ref.actor.strategy": Foreign(None, "the trainer uses FSDP2"),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": Foreign("trainer.context_parallel"),
    "actor_rollout_ref.ref.**": Foreign(
        None, "the run starts an engine for the first weights if an algorithm reads them"
    ),
    "actor_rollout_ref.rollout.n": Foreign("orchestrator.group_size"),
    "actor_rollout_ref.rollout.name": Foreign("inference.engine"),
    "actor_rollout_ref.rollout.temperature": Foreign("orchestrator.train.sampling.temperature"),
    "actor_rollout_ref.rollout.top_p": Foreign(None, "training needs the whole distribution"),
    "actor_rollout_ref.rollout.top_k": Foreign(None, "training needs the whole distribution"),
    "actor_rollout_ref.rollout.response_length": Foreign(
        "orchestrator.train.sampling.max_completion_tokens"
    ),
    "actor_rollout_ref.rollout.prompt_length": Foreign("seq_len", "prompt and completion together"),
    "actor_rollout_ref.rollout.max_model_len": Foreign("inference.max_model_len"),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": Foreign(
        "inference.vllm.tensor_parallel_size"
    ),
    "actor_rollout_ref.rollout.gpu_memory_utilization": Foreign(
        "inference.vllm.gpu_memory_utilization"
    ),
    "actor_rollout_ref.rollout.enforce_eager": Foreign("inference.vllm.enforce_eager"),
    "actor_rollout_ref.rollout.max_num_seqs": Foreign("inference.vllm.max_num_seqs"),
    "actor_rollout_ref.rollout.max_num_batched_tokens": Foreign(
        "inference.vllm.max_num_batched_tokens"
    ),
    "actor_rollout_ref.rollout.val_kwargs.temperature": Foreign(
        "orchestrator.eval.sampling.temperature"
    ),
    "actor_rollout_ref.rollout.val_kwargs.top_p": Foreign("orchestrator.eval.sampling.top_p"),
    "actor_rollout_ref.rollout.val_kwargs.top_k": Foreign("orchestrator.eval.sampling.top_k"),
    "actor_rollout_ref.rollout.val_kwargs.n": Foreign("orchestrator.eval.env.group_size"),
    "actor_rollout_ref.rollout.multi_turn.**": Foreign(None, "an environment decides on its turns"),
    "actor_rollout_ref.hybrid_engine": Foreign("deployment.colocated"),
    "algorithm.adv_estimator": Foreign(
        "orchestrator.algo.type", "grpo of verl divides by the standard deviation: grpo_std"
    ),
    "algorithm.filter_groups.**": Foreign(
        None, "groups whose rewards are equal are never trained; more is sampled in their place"
    ),
    "algorithm.rollout_correction.**": Foreign(
        None, "every loss corrects for the sampler; tis, icepop and geometric_mask set how"
    ),
    "algorithm.use_kl_in_reward": Foreign(None, "a penalty on the loss: algo.penalties"),
    "algorithm.kl_ctrl.**": Foreign(None, "a penalty on the loss: algo.penalties.kl_to_initial"),
    "algorithm.gamma": Foreign("trainer.heads.values.gamma"),
    "algorithm.lam": Foreign("trainer.heads.values.gae_lambda"),
    "algorithm.norm_adv_by_std_in_grpo": Foreign(
        "orchestrator.algo.type", "true: grpo_std; false: grpo"
    ),
    "algorithm.**": Foreign(None, "orchestrator.algo has the keys of the algorithm"),
    "critic.optim.lr": Foreign("trainer.heads.values.lr"),
    "critic.**": Foreign(None, "trainer.heads.values has the keys of the critic"),
    "data.train_files": Foreign(None, DATA),
    "data.val_files": Foreign(None, "an environment brings its data: orchestrator.eval.env"),
    "data.train_batch_size": Foreign(
        "orchestrator.batch_size", "rollouts here, prompts in verl: times rollout.n"
    ),
    "data.max_prompt_length": Foreign("seq_len", "prompt and completion together"),
    "data.max_response_length": Foreign("orchestrator.train.sampling.max_completion_tokens"),
    "data.**": Foreign(None, DATA),
    "reward_model.**": Foreign(None, REWARDS),
    "reward.**": Foreign(None, REWARDS),
    "custom_reward_function.**": Foreign(None, REWARDS),
    "trainer.total_epochs": Foreign(None, "max_steps is the length of a run"),
    "trainer.total_training_steps": Foreign("max_steps"),
    "trainer.project_name": Foreign("monitors.wandb.project"),
    "trainer.experiment_name": Foreign("run.name"),
    "trainer.logger": Foreign("monitors", "each monitor has a table"),
    "trainer.n_gpus_per_node": Foreign("trainer.num_ranks", "of all nodes together"),
    "trainer.nnodes": Foreign("deployment.trainer_nodes"),
    "trainer.save_freq": Foreign("ckpt.interval"),
    "trainer.test_freq": Foreign("orchestrator.eval.env.interval"),
    "trainer.val_before_train": Foreign("orchestrator.eval.skip_first_step", "the opposite"),
    "trainer.default_local_dir": Foreign("output_dir"),
    "trainer.resume_mode": Foreign(None, "on the command line: prime-rl run CONFIG --resume auto"),
    "trainer.critic_warmup": Foreign(None, "policy and critic train from the first step"),
    "trainer.device": Foreign(None, "trainer.device, by default the GPUs that are there"),
    "trainer.use_legacy_worker_impl": Foreign(None, "processes of the run: [deployment]"),
    "trainer.balance_batch": Foreign(None, "ranks are always balanced"),
    "actor_rollout_ref.model.enable_activation_offload": Foreign(
        None, "activations are never moved to the host"
    ),
    "actor_rollout_ref.model.**": Foreign(None, "[model] and [trainer] have the model's keys"),
    "actor_rollout_ref.actor.optim.betas": Foreign(
        "trainer.optim.beta1", "and trainer.optim.beta2"
    ),
    "actor_rollout_ref.actor.use_torch_compile": Foreign("trainer.compile"),
    "actor_rollout_ref.actor.checkpoint.**": Foreign(None, "a checkpoint has everything: [ckpt]"),
    "actor_rollout_ref.actor.optim.**": Foreign(None, "[trainer.optim] and [trainer.scheduler]"),
    "actor_rollout_ref.actor.**": Foreign(None, "[trainer] has the keys of the policy's training"),
    "actor_rollout_ref.rollout.dtype": Foreign("inference.vllm.dtype", "of the engine vllm"),
    "actor_rollout_ref.rollout.enable_chunked_prefill": Foreign(
        "inference.vllm.enable_chunked_prefill", "of the engine vllm"
    ),
    "actor_rollout_ref.rollout.mode": Foreign(None, "rollouts are always asynchronous"),
    "actor_rollout_ref.rollout.calculate_log_probs": Foreign(
        None, "always: the loss reads the log-probabilities of the sampler"
    ),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": Foreign(
        None, "the trainer computes log-probabilities in its own step"
    ),
    "actor_rollout_ref.rollout.agent.**": Foreign(
        None, "orchestrator.env_workers are the processes of environments"
    ),
    "actor_rollout_ref.rollout.load_format": Foreign(
        None, "engines start with the weights of model.name"
    ),
    "actor_rollout_ref.rollout.free_cache_engine": Foreign(
        None, "with deployment.colocated, engine and trainer take turns"
    ),
    "actor_rollout_ref.rollout.val_kwargs.do_sample": Foreign(
        None, "orchestrator.eval.sampling.temperature = 0.0 is greedy"
    ),
    "actor_rollout_ref.rollout.**": Foreign(
        None, "[inference] has the keys of the engines, orchestrator.train.sampling of sampling"
    ),
    "trainer.max_actor_ckpt_to_keep": Foreign("ckpt.keep_last"),
    "trainer.max_critic_ckpt_to_keep": Foreign(None, ONE_CKPT),
    "trainer.default_hdfs_dir": Foreign(None, "checkpoints are in the run directory: output_dir"),
    "trainer.del_local_ckpt_after_load": Foreign(None, "ckpt.keep_last bounds the checkpoints"),
    "trainer.val_only": Foreign(None, "prime-rl eval measures without training"),
    "trainer.log_val_generations": Foreign(
        None, "all held-out rollouts are saved: prime-rl report"
    ),
    "trainer.rollout_data_dir": Foreign(None, "rollouts are saved in the run directory"),
    "trainer.validation_data_dir": Foreign(None, "rollouts are saved in the run directory"),
    "trainer.esi_redundant_time": Foreign(None, "an interrupted run saves: ckpt"),
    "trainer.ray_wait_register_center_timeout": Foreign(None, "[launcher] has the keys of ray"),
    "ray_init.**": Foreign(None, "[launcher] has the keys of ray"),
    "ray_kwargs.**": Foreign(None, "[launcher] has the keys of ray"),
    "global_profiler.**": Foreign(None, "no profile is written"),
    "transfer_queue.**": Foreign(None, "[rollout_transport] moves batches"),
}
"""verl, by the whole key."""

_PENALTIES = "of the algorithms of prime-rl-baselines"
_CLIPPED = 'of trainer.loss.type = "ppo_clip"'
_LORA = "of prime-rl-lora"
_VLLM = "of prime-rl-vllm"
_WHOLE = "training needs the whole distribution"

NAMES: dict[str, Foreign] = {
    "env": Foreign("orchestrator.train.env"),
    "envs": Foreign("orchestrator.train.env"),
    "environment": Foreign("orchestrator.train.env"),
    "environments": Foreign("orchestrator.train.env"),
    "learning_rate": Foreign("trainer.optim.lr"),
    "actor_learning_rate": Foreign("trainer.optim.lr"),
    "lr": Foreign("trainer.optim.lr"),
    "weight_decay": Foreign("trainer.optim.weight_decay"),
    "lr_scheduler_type": Foreign("trainer.scheduler.type"),
    "lr_scheduler": Foreign("trainer.scheduler.type"),
    "warmup": Foreign("trainer.scheduler.warmup_steps"),
    "num_warmup_steps": Foreign("trainer.scheduler.warmup_steps"),
    "warmup_steps": Foreign("trainer.scheduler.warmup_steps"),
    "warmup_ratio": Foreign("trainer.scheduler.warmup_steps", "a number of steps"),
    "lr_warmup_steps": Foreign("trainer.scheduler.warmup_steps"),
    "optim": Foreign("trainer.optim.type"),
    "adam_beta1": Foreign("trainer.optim.beta1"),
    "adam_beta2": Foreign("trainer.optim.beta2"),
    "adam_epsilon": Foreign("trainer.optim.eps"),
    "max_grad_norm": Foreign("trainer.optim.max_norm"),
    "grad_clip": Foreign("trainer.optim.max_norm"),
    "gradient_clipping": Foreign("trainer.optim.max_norm"),
    "batch_size": Foreign("orchestrator.batch_size"),
    "token_batch_size": Foreign("orchestrator.token_batch_size"),
    "train_batch_size": Foreign("orchestrator.batch_size"),
    "rollout_batch_size": Foreign("orchestrator.batch_size"),
    "generation_batch_size": Foreign("orchestrator.batch_size"),
    "ppo_mini_batch_size": Foreign("trainer.minibatches"),
    "num_mini_batches": Foreign("trainer.minibatches"),
    "steps_per_generation": Foreign("trainer.minibatches", "optimizer steps per batch"),
    "ppo_micro_batch_size_per_gpu": Foreign("trainer.micro_batch_tokens", "in tokens"),
    "ppo_max_token_len_per_gpu": Foreign("trainer.micro_batch_tokens"),
    "micro_train_batch_size": Foreign("trainer.micro_batch_tokens", "in tokens"),
    "per_device_train_batch_size": Foreign("trainer.micro_batch_tokens", "in tokens"),
    "per_device_eval_batch_size": Foreign(None, "an evaluation uses all engines"),
    "gradient_accumulation_steps": Foreign(
        "trainer.micro_batch_tokens", "rows are packed, as many as the batch needs"
    ),
    "num_generations": Foreign("orchestrator.group_size"),
    "num_generations_eval": Foreign("orchestrator.eval.env.0.group_size"),
    "rollout_n": Foreign("orchestrator.group_size"),
    "num_rollouts": Foreign("orchestrator.group_size"),
    "n_samples_per_prompt": Foreign("orchestrator.group_size"),
    "rollouts_per_example": Foreign("orchestrator.group_size"),
    "group_size": Foreign("orchestrator.group_size"),
    "temperature": Foreign("orchestrator.train.sampling.temperature"),
    "top_p": Foreign(None, _WHOLE),
    "top_k": Foreign(None, _WHOLE),
    "min_p": Foreign(None, _WHOLE),
    "repetition_penalty": Foreign(None, _WHOLE),
    "max_completion_length": Foreign("orchestrator.train.sampling.max_completion_tokens"),
    "max_response_length": Foreign("orchestrator.train.sampling.max_completion_tokens"),
    "max_new_tokens": Foreign("orchestrator.train.sampling.max_completion_tokens"),
    "max_tokens": Foreign("orchestrator.train.sampling.max_completion_tokens"),
    "max_completion_tokens": Foreign("orchestrator.train.sampling.max_completion_tokens"),
    "generate_max_len": Foreign("orchestrator.train.sampling.max_completion_tokens"),
    "max_prompt_length": Foreign("seq_len", "prompt and completion together"),
    "max_model_len": Foreign("seq_len"),
    "max_length": Foreign("seq_len"),
    "max_seq_len": Foreign("seq_len"),
    "max_seq_length": Foreign("seq_len"),
    "model_name": Foreign("model.name"),
    "model_name_or_path": Foreign("model.name"),
    "total_steps": Foreign("max_steps"),
    "num_steps": Foreign("max_steps"),
    "num_train_epochs": Foreign("max_steps", "steps, not passes over the data"),
    "num_epochs": Foreign("max_steps", "steps, not passes over the data"),
    "num_episodes": Foreign("max_steps"),
    "total_epochs": Foreign("max_steps", "steps, not passes over the data"),
    "total_training_steps": Foreign("max_steps"),
    "save_steps": Foreign("ckpt.interval"),
    "save_total_limit": Foreign("ckpt.keep_last"),
    "save_freq": Foreign("ckpt.interval"),
    "save_strategy": Foreign(None, "ckpt.interval counts steps, ckpt.seconds seconds"),
    "eval_steps": Foreign("orchestrator.eval.env.0.interval"),
    "eval_strategy": Foreign(None, "each [[orchestrator.eval.env]] has an interval"),
    "test_freq": Foreign("orchestrator.eval.env.0.interval"),
    "logging_steps": Foreign("monitors.file.interval"),
    "log_completions": Foreign("orchestrator.save_rollouts"),
    "run_name": Foreign("run.name"),
    "experiment_name": Foreign("run.name"),
    "advantage_estimator": Foreign("orchestrator.algo.type"),
    "adv_estimator": Foreign("orchestrator.algo.type"),
    "scale_rewards": Foreign("orchestrator.algo.type", "group: grpo_std; none: grpo"),
    "actor_rollout_ref": Foreign("trainer"),
    "dataset_name": Foreign(None, DATA),
    "reward_funcs": Foreign(None, REWARDS),
    "reward_weights": Foreign(None, "args.weights of an env function, by name"),
    "loss_type": Foreign(
        "trainer.loss.type", "grpo: normalize_by sequences; dapo, bnpo: tokens; dr_grpo: constant"
    ),
    "importance_sampling_level": Foreign("trainer.loss.type", "sequence: gspo"),
    "num_iterations": Foreign("trainer.epochs"),
    "ppo_epochs": Foreign("trainer.epochs"),
    "num_ppo_epochs": Foreign("trainer.epochs"),
    "mask_truncated_completions": Foreign(None, "a filter drops rollouts: post_batch_filters"),
    "sync_ref_model": Foreign("trainer.ema_decay", "an average of the weights"),
    "ref_model_mixup_alpha": Foreign("trainer.ema_decay", "1 minus this"),
    "disable_dropout": Foreign(None, "the trainer has no dropout"),
    "gradient_checkpointing": Foreign("trainer.activation_checkpointing", "true is 1"),
    "enable_gradient_checkpointing": Foreign("trainer.activation_checkpointing", "true is 1"),
    "torch_compile": Foreign("trainer.compile"),
    "bf16": Foreign("trainer.dtype", 'true is "bfloat16"'),
    "fp16": Foreign("trainer.dtype", '"bfloat16" or "float32"'),
    "torch_dtype": Foreign("trainer.dtype"),
    "dtype": Foreign("trainer.dtype"),
    "attn_implementation": Foreign("trainer.attention"),
    "n_gpus_per_node": Foreign("trainer.num_ranks"),
    "wandb_project": Foreign("monitors.wandb.project"),
    "project_name": Foreign("monitors.wandb.project"),
    "report_to": Foreign("monitors"),
    "resume_from_checkpoint": Foreign(None, "on the command line: prime-rl run CONFIG --resume"),
    "remove_unused_columns": Foreign(None, "an environment gets every column of its data"),
    "shuffle_dataset": Foreign(None, "the sampler decides: orchestrator.sampler"),
    "push_to_hub": Foreign(None, "upload <run>/weights after the run"),
    "use_vllm": Foreign("inference.engine", 'true is "vllm"'),
    "vllm_mode": Foreign("deployment.colocated", '"colocate" is true'),
    "vllm_server_base_url": Foreign("inference.base_url"),
    "vllm_importance_sampling_correction": Foreign(
        "trainer.loss.type", "tis and icepop correct; so does the default"
    ),
    "vllm_max_model_length": Foreign("inference.max_model_len"),
    "chat_template_kwargs": Foreign(None, "the renderer has these settings: orchestrator.renderer"),
    "generation_kwargs": Foreign("orchestrator.train.sampling.extra_body"),
    "beta": Foreign("orchestrator.algo.penalties.kl_to_initial", _PENALTIES),
    "kl_coef": Foreign("orchestrator.algo.penalties.kl_to_initial", _PENALTIES),
    "kl_loss_coef": Foreign("orchestrator.algo.penalties.kl_to_initial", _PENALTIES),
    "init_kl_coef": Foreign("orchestrator.algo.penalties.kl_to_initial", _PENALTIES),
    "use_kl_loss": Foreign("orchestrator.algo.penalties.kl_to_initial", _PENALTIES),
    "entropy_coeff": Foreign("orchestrator.algo.penalties.entropy_bonus", _PENALTIES),
    "entropy_coef": Foreign("orchestrator.algo.penalties.entropy_bonus", _PENALTIES),
    "ent_coef": Foreign("orchestrator.algo.penalties.entropy_bonus", _PENALTIES),
    "clip_range": Foreign("trainer.loss.clip_eps_high", _CLIPPED),
    "clip_ratio": Foreign("trainer.loss.clip_eps_high", _CLIPPED),
    "cliprange": Foreign("trainer.loss.clip_eps_high", _CLIPPED),
    "eps_clip": Foreign("trainer.loss.clip_eps_high", _CLIPPED),
    "epsilon": Foreign("trainer.loss.clip_eps_high", _CLIPPED),
    "clip_eps": Foreign("trainer.loss.clip_eps_high", _CLIPPED),
    "clip_ratio_high": Foreign("trainer.loss.clip_eps_high", _CLIPPED),
    "eps_clip_high": Foreign("trainer.loss.clip_eps_high", _CLIPPED),
    "epsilon_high": Foreign("trainer.loss.clip_eps_high", _CLIPPED),
    "clip_ratio_low": Foreign("trainer.loss.clip_eps_low", _CLIPPED),
    "eps_clip_low": Foreign("trainer.loss.clip_eps_low", _CLIPPED),
    "clip_ratio_c": Foreign("trainer.loss.dual_clip", _CLIPPED),
    "delta": Foreign("trainer.loss.dual_clip", _CLIPPED),
    "lora_r": Foreign("trainer.lora.rank", _LORA),
    "lora_rank": Foreign("trainer.lora.rank", _LORA),
    "lora_alpha": Foreign("trainer.lora.alpha", _LORA),
    "lora_dropout": Foreign(None, DROPOUT),
    "lora_target_modules": Foreign("trainer.lora.target_modules", _LORA),
    "use_peft": Foreign("trainer.lora", _LORA),
    "vllm_gpu_memory_utilization": Foreign("inference.vllm.gpu_memory_utilization", _VLLM),
    "gpu_memory_utilization": Foreign("inference.vllm.gpu_memory_utilization", _VLLM),
    "vllm_tensor_parallel_size": Foreign("inference.vllm.tensor_parallel_size", _VLLM),
    "tensor_model_parallel_size": Foreign("inference.vllm.tensor_parallel_size", _VLLM),
}
"""TRL, OpenRLHF and Hugging Face's trainer, whose configs are flat: by the last part of a key."""


def _alike(foreign: Foreign, names: str) -> dict[str, Foreign]:
    return dict.fromkeys(names.split(), foreign)


TRL: dict[str, Foreign] = {
    "use_cpu": Foreign("trainer.device", 'true is "cpu"'),
    "eval_on_start": Foreign("orchestrator.eval.skip_first_step", "the opposite"),
    "data_seed": Foreign("seed"),
    "vllm_server_timeout": Foreign("inference.ready_timeout"),
    "metric_for_best_model": Foreign("ckpt.best", "eval/ENV/NAME"),
    **_alike(
        Foreign(None, "a run of Hugging Face's trainer on the hub; here Run.push after the run"),
        "hub_model_id hub_private_repo hub_token hub_strategy hub_always_push hub_revision "
        "log_completions_hub_repo trackio_space_id trackio_bucket_id trackio_static_space_id",
    ),
    **_alike(
        Foreign(None, "trainer.num_ranks and trainer.dp_replicate divide the model over ranks"),
        "fsdp fsdp_config deepspeed parallelism_config accelerator_config local_rank "
        "ds3_gather_for_generation",
    ),
    **_alike(
        Foreign(None, "a step is the same for any number of ranks"),
        "ddp_backend ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb "
        "ddp_broadcast_buffers ddp_static_graph average_tokens_across_devices",
    ),
    **_alike(
        Foreign(None, "an evaluation samples and scores: orchestrator.eval"),
        "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object batch_eval_metrics "
        "include_for_metrics prediction_loss_only label_names eval_delay do_eval do_predict",
    ),
    **_alike(
        Foreign(None, "an environment has its own processes: orchestrator.env_workers"),
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
        "dataloader_multiprocessing_context train_sampling_strategy length_column_name",
    ),
    **_alike(
        Foreign(None, "every step is in metrics.jsonl; log.level, view.type"),
        "logging_strategy logging_first_step logging_nan_inf_filter log_on_each_node log_level "
        "log_level_replica disable_tqdm include_num_input_tokens_seen project",
    ),
    **_alike(
        Foreign(None, "all rollouts are saved (orchestrator.save_rollouts); prime-rl report"),
        "num_completions_to_print log_unique_prompts log_multimodal",
    ),
    **_alike(
        Foreign(None, "[ckpt] has interval, seconds, keep_last and best"),
        "save_only_model save_on_each_node enable_jit_checkpoint load_best_model_at_end "
        "greater_is_better ignore_data_skip restore_callback_states_from_checkpoint",
    ),
    **_alike(
        Foreign(None, "trainer.dtype and trainer.attention decide how the model computes"),
        "model_init_kwargs tf32 bf16_full_eval fp16_full_eval cast_lm_head_to_fp32 use_cache",
    ),
    **_alike(
        Foreign(None, "trainer.balance_loss is such a loss: of each row, and a token counts once"),
        "router_aux_loss_coef",
    ),
    **_alike(
        Foreign(None, "trainer.compile, trainer.fused_lm_head, trainer.activation_checkpointing"),
        "torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config "
        "gradient_checkpointing_kwargs torch_empty_cache_steps",
    ),
    **_alike(
        Foreign(None, "trainer.optim.type and trainer.scheduler.type have keys of their own"),
        "optim_args optim_target_modules lr_scheduler_kwargs",
    ),
    **_alike(
        Foreign(None, "[inference] has the keys of the engines; inference.base_url for others"),
        "vllm_server_host vllm_server_port vllm_group_port vllm_model_impl "
        "vllm_structured_outputs_regex cache_implementation use_transformers_paged "
        "use_transformers_continuous_batching transformers_continuous_batching_config",
    ),
    "vllm_enable_sleep_mode": Foreign(
        None, "with deployment.colocated, engine and trainer take turns"
    ),
    **_alike(
        Foreign(None, "of the losses tis, icepop and geometric_mask: trainer.loss.type"),
        "vllm_importance_sampling_mode vllm_importance_sampling_cap "
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
        "off_policy_mask_threshold",
    ),
    **_alike(
        Foreign(None, "algo.entropy of the algorithms of prime-rl-baselines"),
        "use_adaptive_entropy entropy_target entropy_coef_delta entropy_coef_min entropy_coef_max",
    ),
    **_alike(
        Foreign(None, "no loss here has it; docs/tutorial-loss.md"),
        "top_entropy_quantile vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg "
        "use_bias_correction_kl label_smoothing_factor neftune_noise_alpha",
    ),
    "sapo_temperature_pos": Foreign("trainer.loss.tau_pos", "of the loss sapo"),
    "sapo_temperature_neg": Foreign("trainer.loss.tau_neg", "of the loss sapo"),
    "ref_model_sync_steps": Foreign(None, "trainer.ema_decay averages after every batch"),
    "multi_objective_aggregation": Foreign(None, "terms of a reward are added, then compared"),
    "max_tool_calling_iterations": Foreign("orchestrator.train.env.0.max_turns"),
    "pad_to_multiple_of": Foreign(None, "rows are packed, never padded"),
    "trust_remote_code": Foreign(None, "code of a model's repository is never run"),
    **_alike(
        Foreign(None, "prime-rl plan shows before the start whether a config fits"),
        "auto_find_batch_size skip_memory_metrics debug",
    ),
    "model_init_kwargs.dtype": Foreign("trainer.dtype"),
    "model_init_kwargs.torch_dtype": Foreign("trainer.dtype"),
    "model_init_kwargs.**": Foreign(
        None, "trainer.dtype and trainer.attention decide how the model computes"
    ),
    **{
        f"generation_kwargs.{name}": Foreign(None, _WHOLE)
        for name in ("top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
    },
    "generation_kwargs.**": Foreign(
        "orchestrator.train.sampling.extra_body.**", "as the engine calls it"
    ),
    "chat_template_kwargs.**": Foreign("orchestrator.renderer.**", "a key of the renderer"),
    "lr_scheduler_kwargs.min_lr": Foreign("trainer.scheduler.min_lr"),
    "lr_scheduler_kwargs.**": Foreign(None, "[trainer.scheduler] has the keys of a schedule"),
    "peft_config.r": Foreign("trainer.lora.rank", _LORA),
    "peft_config.lora_alpha": Foreign("trainer.lora.alpha", _LORA),
    "peft_config.target_modules": Foreign("trainer.lora.target_modules", _LORA),
    "peft_config.use_rslora": Foreign("trainer.lora.use_rslora", _LORA),
    "peft_config.modules_to_save": Foreign("trainer.lora.modules_to_save", _LORA),
    "use_rslora": Foreign("trainer.lora.use_rslora", _LORA),
    "lora_modules_to_save": Foreign("trainer.lora.modules_to_save", _LORA),
    "peft_config.**": Foreign(None, "[trainer.lora] has the keys of an adapter"),
    **_alike(
        Foreign(None, "[trainer.lora] has the keys of an adapter"),
        "lora_target_parameters lora_task_type use_dora",
    ),
    **_alike(
        Foreign(None, "weights are trained in full precision"),
        "load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage "
        "quantization_config",
    ),
    **_alike(
        Foreign(None, DATA),
        "train_dataset dataset_config dataset_train_split dataset_streaming datasets streaming",
    ),
    **_alike(
        Foreign(None, "an environment brings its data: orchestrator.eval.env"),
        "eval_dataset dataset_test_split test_split_size",
    ),
    "model_revision": Foreign(None, "model.name is a folder or the newest revision on the hub"),
    "ignore_bias_buffers": Foreign(None, "a step is the same for any number of ranks"),
    "callbacks": Foreign(None, "on_step of prime_rl.train; observers inside the run"),
    "reward_model_name_or_path": Foreign(None, "a reward that asks the model: async def"),
    "full_determinism": Foreign(None, "a run with max_off_policy_steps = 0 repeats bit for bit"),
    "do_train": Foreign(None, "prime-rl run trains"),
}
"""What else TRL's trainer and its command take: GRPOConfig, which contains Hugging Face's
TrainingArguments, and the arguments beside it. Whole keys of a flat config."""

PathPart = str | int
"""One part of a key's path: a name, or the number of a list entry."""


class Match(NamedTuple):
    """An entry of the table that speaks of a key."""

    pattern: str
    path: tuple[PathPart, ...] | None
    """``ours`` with its wildcards filled in, without numbers of list entries, but for those in what
    ``**`` stands for."""
    note: str
    numbers: tuple[int, ...]
    """The numbers of list entries in the foreign key, before what ``**`` stands for."""

    @property
    def ours(self) -> str | None:
        """The path as a dotted key."""
        return None if self.path is None else ".".join(map(str, self.path))


def look_up(path: Sequence[PathPart], table: dict[str, Foreign]) -> Match | None:
    """The note that a table has about a key."""
    for pattern, foreign in table.items():
        filled = _filled(pattern.split("."), path)
        if filled is None:
            continue
        names, numbers, rest = filled
        ours: list[PathPart] = []
        for part in [] if foreign.ours is None else foreign.ours.split("."):
            if part == "**":
                ours += rest
            else:
                ours.append(names.pop(0) if part == "*" else part)
        target = None if foreign.ours is None else tuple(ours)
        return Match(pattern, target, foreign.note, tuple(numbers))

    return None


def _filled(
    pattern: Sequence[str], path: Sequence[PathPart]
) -> tuple[list[PathPart], list[int], Sequence[PathPart]] | None:
    """What each ``*`` of a pattern stands for, the numbers of list entries, and what ``**`` stands
    for; None: the pattern does not match."""
    names: list[PathPart] = []
    numbers: list[int] = []
    place = 0
    for part in pattern:
        while place < len(path) and isinstance(path[place], int):
            numbers.append(int(path[place]))
            place += 1
        if part == "**":
            return names, numbers, path[place:]
        if place == len(path) or part not in ("*", path[place]):
            return None
        if part == "*":
            names.append(path[place])
        place += 1

    rest = path[place:]
    numbers += [each for each in rest if isinstance(each, int)]
    return (names, numbers, []) if len(numbers) + len(pattern) == len(path) else None


def path_of(key: str) -> tuple[PathPart, ...]:
    """A dotted key as a path."""
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


@cache
def our_keys() -> dict[str, FieldInfo]:
    """Every key of the schema, dotted, without the numbers of list entries."""
    return dict(_keys_of(RunConfig, ""))


def _keys_of(model: type[BaseModel], place: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        key = f"{place}{name}"
        yield key, info
        for inner in _models_in(info.annotation):
            yield from _keys_of(inner, f"{key}.")


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    if get_origin(annotation) is dict:  # a name stands between
        return
    for argument in get_args(annotation):
        yield from _models_in(argument)


SHORT: dict[str, Foreign] = {
    "algo": Foreign("orchestrator.algo.type"),
    "algo.**": Foreign("orchestrator.algo.**"),
    "algorithm": Foreign("orchestrator.algo.type"),
    "engine": Foreign("inference.engine"),
    "epochs": Foreign(None, "max_steps is the length of a run"),
    "gpu": Foreign(None, PLACES),
    "gpus": Foreign(None, PLACES),
    "lora": Foreign("trainer.lora", "a table"),
    "lora.**": Foreign("trainer.lora.**"),
    "loss": Foreign("trainer.loss.type"),
    "loss.**": Foreign("trainer.loss.**"),
    "name": Foreign("run.name"),
    "num_gpus": Foreign(None, PLACES),
    "optim.**": Foreign("trainer.optim.**"),
    "renderer": Foreign("orchestrator.renderer.name"),
    "renderer.**": Foreign("orchestrator.renderer.**"),
    "sampling.**": Foreign("orchestrator.train.sampling.**"),
    "teacher": Foreign("orchestrator.algo.teacher", "of the distillations"),
    "tensorboard": Foreign("monitors.tensorboard", "a table"),
    "vllm": Foreign("inference.engine", 'the value is "vllm"'),
    "wandb": Foreign("monitors.wandb", "a table"),
}
"""Our own keys without the tables that they are in, as a user types them first."""

KINDS = {"trainer": ("tuning", "trainer_observer"), "inference": ("engine",)}
"""Tables in which a plugin has a table of its name, and the sorts of plugin."""


def is_ours(path: Sequence[PathPart]) -> bool:
    """Whether our schema has the key, or a plugin's table that may have it."""
    known = our_keys()
    names = [part for part in path if isinstance(part, str)]
    if "." in "".join(names):
        return False
    if ".".join(names) in known:
        return True
    for length in range(len(names) - 1, 0, -1):
        prefix = ".".join(names[:length])
        if prefix in KINDS:
            return any(bringer(kind, names[length]) for kind in KINDS[prefix])
        if prefix in known:
            return _takes_any_key(known[prefix].annotation)

    return False


def is_table(path: Sequence[PathPart]) -> bool:
    """Whether our schema has a table there, and no plain value."""
    key = ".".join(part for part in path if isinstance(part, str))
    info = our_keys().get(key)
    if info is None:
        return False
    annotations = get_args(info.annotation) or (info.annotation,)
    kinds = [each for each in annotations if each is not NoneType]
    return all(isinstance(each, type) and issubclass(each, BaseModel) for each in kinds)


def _takes_any_key(annotation: Any) -> bool:
    if get_origin(annotation) is dict:
        return True
    if isinstance(annotation, type):
        return issubclass(annotation, PluginTable)
    return any(map(_takes_any_key, get_args(annotation)))


def may_be_list(path: Sequence[PathPart]) -> bool:
    """Whether the value of a key may be a list: the schema has one there, or a plugin's table."""
    info = our_keys().get(".".join(str(part) for part in path if not str(part).isdecimal()))
    if info is None:
        return is_ours([part for part in path if not str(part).isdecimal()])
    return _has_a_list(info.annotation)


def _has_a_list(annotation: Any) -> bool:
    if get_origin(annotation) in (tuple, list):
        return True
    return any(map(_has_a_list, get_args(annotation)))


def advice(key: str, value: Any = UNKNOWN) -> Match | None:
    """Where a key that is unknown belongs: by the tables of whole keys, by the same name elsewhere
    in our schema, by the table of names. None: nothing is known."""
    path = path_of(key)
    names = [part for part in path if isinstance(part, str)]
    match = look_up(path, PRIME_RL) or look_up(path, SHORT) or look_up(path, VERL)
    if match is None and len(names) > 1:
        match = _without_process(names) or _same_name(names, value)
    if match is None:
        match = look_up(names[-1:], NAMES) or look_up(path, TRL)
    is_itself = match is not None and match.ours in (key, ".".join(names))
    return None if is_itself or match is None else _spelled(match)


def _spelled(match: Match) -> Match | None:
    """A match whose last part, which ``**`` took from the user, is a key of our schema: it may be
    misspelt as well. Else its table. None: that is not ours either."""
    if match.path is None or not match.pattern.endswith("**") or is_ours(match.path):
        return match
    *table, name = match.path
    prefix = ".".join(part for part in table if isinstance(part, str))
    siblings = [key.rpartition(".")[2] for key in our_keys() if key.rpartition(".")[0] == prefix]
    close = difflib.get_close_matches(str(name), siblings, n=1)
    path = (*table, *close)
    return match._replace(path=path) if is_ours(path) else None


def _without_process(names: list[str]) -> Match | None:
    """The match for a key that begins with a table of one process: ``eval.interval``."""
    if names[0] in our_keys():
        return None
    for process in ("orchestrator", "trainer"):
        path = (process, *names)
        if f"{process}.{names[0]}" not in our_keys():
            continue
        match = look_up(path, PRIME_RL)
        if match is not None:
            return match
        if is_ours(path):
            return Match(".".join(path), path, "", ())

    return None


def _same_name(names: list[str], value: Any) -> Match | None:
    """The nearest key of our schema to ``names``. It has the same last name and takes the value,
    and it shares a table with ``names`` or is the only key of this last name."""
    ranked = []
    for key, info in our_keys().items():
        path = key.split(".")
        if path[-1] != names[-1] or path == names or not fits(info, value):
            continue
        shared = 0
        for one, other in zip(path[:-1], names[:-1], strict=False):
            if one != other:
                break
            shared += 1
        ranked.append((-shared, len(path), key))

    ranked.sort()
    if not ranked or (len(ranked) > 1 and ranked[0][:2] == ranked[1][:2]):
        return None
    is_near = ranked[0][0] < 0 or (len(ranked) == 1 and "_" in names[-1])
    nearest = ranked[0][2]
    return Match(nearest, tuple(nearest.split(".")), "", ()) if is_near else None
