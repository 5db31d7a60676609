#!/usr/bin/env bash
# KVPP with prefill context parallelism: the group is TP x PCP, 16 ranks here.
# MODEL: a folder or a name; further vLLM options may follow.
set -euo pipefail
exec vllm serve "${MODEL:-deepseek-ai/DeepSeek-V3}" \
    --tensor-parallel-size 8 \
    --prefill-context-parallel-size 2 \
    --enable-expert-parallel \
    --compilation-config '{"cudagraph_mode": "PIECEWISE"}' \
    --additional-config '{"enable_kvpp": true}' \
    "$@"
