#!/usr/bin/env bash
# Two laptops over ssh: bash examples/clusters/laptops.sh
# Both have the same environment, model.onnx and train.npz, in folders of the same names. This one reaches the other by
# ssh without a password (ssh-copy-id). The names in hosts.txt are theirs, each with the number of its ranks.

set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" # cores of a laptop, divided by its ranks

mpiexec -launcher ssh -f "${HOSTS:-$here/hosts.txt}" -n 2 -genv OMP_NUM_THREADS "$OMP_NUM_THREADS" \
  gradgraph train model.onnx --data train.npz --run runs/a --epochs 10 --batch-size 64 --rank-timeout 120
