#!/usr/bin/env bash
# Train on one machine or several under torchrun.
#
#     recipes/launch/torchrun.sh pretrain --dataset FOLDER                      # all GPUs of this machine
#     NODES=2 NODE=0 HOST=first recipes/launch/torchrun.sh pretrain --dataset FOLDER --output_dir RUN    # on "first"
#     NODES=2 NODE=1 HOST=first recipes/launch/torchrun.sh pretrain --dataset FOLDER --output_dir RUN    # on the second
#
# The variables are those of accelerate.sh.
set -euo pipefail

stage=$1
shift
exec torchrun --nnodes "${NODES:-1}" --node-rank "${NODE:-0}" --nproc-per-node "${PROCESSES:-gpu}" \
    --master-addr "${HOST:-127.0.0.1}" --master-port "${PORT:-29500}" \
    --module "livt_hf.recipes.$stage" "$@"
