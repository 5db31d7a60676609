#!/usr/bin/env bash
# KVPP with experts over the ranks, chunked prefill, prefix caching and asynchronous scheduling.
# MODEL: a folder or a name; further vLLM options may follow.
set -euo pipefail
exec vllm serve "${MODEL:-deepseek-ai/DeepSeek-V2-Lite}" \
    --tensor-parallel-size 2 \
    --enable-expert-parallel \
    --enable-chunked-prefill \
    --enable-prefix-caching \
    --async-scheduling \
    --max-num-batched-tokens 32768 \
    --max-num-seqs 12 \
    --compilation-config '{"cudagraph_mode": "PIECEWISE"}' \
    --additional-config '{"enable_kvpp": true}' \
    "$@"
