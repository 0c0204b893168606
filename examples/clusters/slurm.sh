#!/usr/bin/env bash
# Slurm: sbatch examples/clusters/slurm.sh
# One rank with eight cores on each of four nodes; all see model.onnx, train.npz and the environment in $HOME/gradgraph.
#SBATCH --job-name=gradgraph
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120

set -euo pipefail
module load mpich 2>/dev/null || true # the site's MPI, under the name that it has there; mpi4py finds it
source "$HOME/gradgraph/bin/activate"
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-8}"

# SIGTERM comes two minutes before the time is over: the run saves and ends, and the same job goes on from there.
resume=()
if [ -d runs/a ]; then resume=(--resume); fi
# pmi2 is MPICH's way to find each other; Open MPI wants --mpi=pmix
srun --mpi=pmi2 gradgraph train model.onnx --data train.npz --run runs/a --epochs 10 --batch-size 1024 \
  --rank-timeout 600 "${resume[@]}"
