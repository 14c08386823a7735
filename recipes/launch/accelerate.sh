#!/usr/bin/env bash
# Train on one machine or several under Accelerate.
#
#     recipes/launch/accelerate.sh pretrain --dataset FOLDER                    # all GPUs of this machine
#     NODES=2 NODE=0 HOST=first recipes/launch/accelerate.sh pretrain --dataset FOLDER --output_dir RUN    # on "first"
#     NODES=2 NODE=1 HOST=first recipes/launch/accelerate.sh pretrain --dataset FOLDER --output_dir RUN    # on the second
#
# NODES is the number of machines, NODE the number of this one from 0, HOST the name or address of machine 0 and PORT a
# free port there. PROCESSES is the number of processes on each machine. The machines must share the folder of the run
# and read the same data. Without GPUs set ACCELERATE_USE_CPU=1 and PROCESSES.
set -euo pipefail

nodes=${NODES:-1}
processes=$((nodes * ${PROCESSES:-$(nvidia-smi --list-gpus | wc -l)}))
if [ "$processes" -le 1 ]; then exec livt --num_processes 1 "$@"; fi

# `livt` is `accelerate launch`. Accelerate says --multi_gpu also of several CPU processes. Precision is an option of the
# recipes (--mixed_precision) and not of the launcher.
exec livt --multi_gpu --num_machines "$nodes" --machine_rank "${NODE:-0}" --num_processes "$processes" \
    --main_process_ip "${HOST:-127.0.0.1}" --main_process_port "${PORT:-29500}" \
    --mixed_precision no --dynamo_backend no "$@"
