#!/bin/sh
# Every figure of docs/hopper.md that one rank of EP64 gives, on a Hopper card.
#   benchmarks/sweep/run_sweep.sh FOLDER_OF_CONFIG_JSON [OUTPUT_FOLDER]
set -eu
model=$1
out=${2:-.}
PYTHONPATH=src python3 -m deepinfer bench rank --model "$model" --ranks 64 --context 131072 --drafts 3 \
    --requests 1,2,4,8,16,32,64,128,256 --prefill 4096,65536 --json "$out/rank.json" --plot "$out/rank.svg"
