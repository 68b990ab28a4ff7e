#!/bin/sh
# Install what shoal needs with one Python, each file with its SHA-256: `install.sh .venv/bin/python [more.txt ...]`.
# Nothing but what is locked is asked for, not even to build with. pip takes the torch that it would take without hashes
# (CUDA's, unless TORCH_INDEX or its configuration names an index or a folder with the CPU build), and only then compares;
# CUDA's libraries follow that choice. shoal itself is not installed.
set -eu
python=$1
shift
lock=$(dirname "$0")
torch=$(mktemp -d)
trap 'rm -r "$torch"' EXIT
locked() { "$python" -m pip install --require-hashes --no-deps "$@"; }

locked -r "$lock/build.txt"
for list in run.txt "$@"; do
  locked --no-build-isolation -r "$lock/$list"
done
"$python" -m pip download --no-deps --only-binary :all: -d "$torch" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -c "$lock/../constraints.txt" torch
locked --no-index --find-links "$torch" -r "$lock/torch.txt"
if "$python" -m pip show --files torch | grep -q libtorch_cuda.so; then
  locked -r "$lock/cuda.txt"
fi
