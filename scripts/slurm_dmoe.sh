#!/usr/bin/env bash
#SBATCH --job-name=dmoe_46m
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --output=%x_%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@300
# An example: dMoE-XS over two machines. From the repository's root:
#   DATA_PREFIX=/shared/data/pile sbatch scripts/slurm_dmoe.sh /shared/runs/dmoe_46m [STEPS …]
# The run folder and the data set must be visible to every machine. More machines: sbatch --nodes=N, and a smaller BATCH.
# Ranks that die are started again up to MAX_RESTARTS times, and a job whose machine died is queued again. Five minutes
# before the time limit every rank saves and exits; then submit the same command again. In each case the run resumes.
# With 16 GPUs each GPU gets 32 of the 512 sequences of a step, so BATCH is 32 below.
set -euo pipefail
EXP_DIR=${1:?EXP_DIR, a folder that all machines see, is missing}
export NNODES=${SLURM_NNODES:?is unset: submit this script with sbatch} NGPU=${NGPU:-8} MAX_RESTARTS=${MAX_RESTARTS:-3}
# Not "| head": it can exit before scontrol has written everything, and pipefail would then fail the job.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
# Each machine expands SLURM_NODEID and SLURMD_NODENAME, because only the machine itself knows them.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID LOCAL_ADDR=$SLURMD_NODENAME exec bash exp/dmoe/dmoe_46m_8gpu.sh "$@"' _ \
    "$EXP_DIR" "${2:-20000}" "${3:-64}" "${4:-1}" "${5:-0.1}" "${6:-32}"
