#!/usr/bin/env bash
# KVPP for a sparse model (SFA) with C8 caches. Not on CUDA yet, where it is refused; on Ascend
# C8 layouts follow the quantization of the weights: leave --kv-cache-dtype out there.
# MODEL: a folder or a name; further vLLM options may follow.
set -euo pipefail
exec vllm serve "${MODEL:-deepseek-ai/DeepSeek-V3.2}" \
    --tensor-parallel-size 8 \
    --enable-expert-parallel \
    --kv-cache-dtype fp8_ds_mla \
    --enforce-eager \
    --additional-config '{"enable_kvpp": true}' \
    "$@"
