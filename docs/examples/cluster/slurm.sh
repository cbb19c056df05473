#!/bin/bash
#SBATCH --job-name=prime-rl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --output=%x-%j.log
# sbatch slurm.sh CONFIG.toml [--dotted.key VALUE]...
#
# Two nodes are engines and two train; the supervisor and the orchestrator are on the first of them.
# The directory this is submitted from must be on a disk that all nodes share.
set -euo pipefail

config=${1:?usage: sbatch slurm.sh CONFIG.toml [--dotted.key VALUE]...}
shift
engines=${ENGINES:-2}
trainers=${TRAINERS:-2}
ranks=${RANKS:-$((trainers * 8))}
outputs=${OUTPUTS:-outputs}
run=${RUN:-slurm-$SLURM_JOB_ID}
address=${ADDRESS:-auto} # where each node listens: at its own address

# The run's key. srun hands the environment on; no file holds it.
PRIME_RL_ADMIN_KEY=$(head -c 24 /dev/urandom | base64)
export PRIME_RL_ADMIN_KEY

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
srun --nodes="$engines" --ntasks="$engines" \
    prime-rl join "$outputs/$run" inference --address "$address" &
srun --nodes="$trainers" --ntasks="$trainers" \
    prime-rl join "$outputs/$run" trainer --address "$address" &

prime-rl run "$config" --launcher join --launcher.address "$address" \
    --output-dir "$outputs" --run.name "$run" \
    --inference.replicas "$engines" \
    --deployment.trainer_nodes "$trainers" --trainer.num-ranks "$ranks" "$@"
wait # the machines leave by themselves when the run is over
