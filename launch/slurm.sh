#!/usr/bin/env bash
# Workers on a cluster:  ECHO2_TICKET=@outputs/RUN/ticket sbatch --array=0-7 launch/slurm.sh
# Without GPUs:  ... sbatch --gres=none --array=0-7 launch/slurm.sh
#SBATCH --job-name=echo2-worker
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@60
set -euo pipefail
# shellcheck disable=SC1091
source .venv/bin/activate
export OMP_NUM_THREADS=1 ECHO2_STATE="${SLURM_SUBMIT_DIR:-.}/outputs/workers/${SLURM_JOB_ID:-0}"
# Without srun: its steps get SIGTERM before the job is preempted, and when the worker has left, the job is over instead
# of requeued.
exec bash launch/worker.sh
