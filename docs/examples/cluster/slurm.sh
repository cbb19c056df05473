#!/bin/bash
#SBATCH --job-name=prime-rl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.log
# sbatch slurm.sh CONFIG.toml [--dotted.key VALUE]...
#
# Starts one Ray cluster on all nodes of the job and `prime-rl run` on the first node. Ray stops
# when the run ends. Submit the script from a directory on a disk that all nodes share, with an
# environment active that has prime-rl and prime-rl-ray.
set -euo pipefail

config=${1:?usage: sbatch slurm.sh CONFIG.toml [--dotted.key VALUE]...}
shift
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=${ADDRESS:-$head:6379} # HOST:PORT of Ray on the first node

# By default, the first node waits 30 seconds for the others, and they wait 60 seconds for it: too
# little where Python starts from a cold disk. The second limit also applies at the end: the others
# leave that long after the first node has stopped Ray.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=${RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT:-600}
export RAY_gcs_rpc_server_reconnect_timeout_s=${RAY_gcs_rpc_server_reconnect_timeout_s:-120}

# The exit code of the run comes by this file: that of `ray symmetric-run` (Ray 2.60) is 0 if Ray does
# not start, and 1 after a run that succeeds.
code_file=$PWD/slurm-$SLURM_JOB_ID.exit
trap 'rm -f "$code_file"' EXIT

# Without --cpu-bind=none, Slurm may bind the single task of a node, with all its children, to one
# core.
# shellcheck disable=SC2016 # the inner bash expands it
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
    --cpu-bind=none --kill-on-bad-exit=1 \
    ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \
    ${SLURM_CPUS_PER_TASK:+--num-cpus "$SLURM_CPUS_PER_TASK"} -- \
    bash -c '"$@"; code=$?; echo $code >"$0"; exit $code' "$code_file" \
    prime-rl run "$config" --launcher ray --run.name "slurm-$SLURM_JOB_ID" "$@" || true
if [[ ! -e $code_file ]]; then
    echo "error: the run did not start on $head, or was killed: see Ray's messages above" >&2
    exit 1
fi
exit "$(<"$code_file")"
