#!/usr/bin/env bash
# KVPP over two ranks, with PIECEWISE graphs. Eager: --enforce-eager instead.
# MODEL: a folder or a name; further vLLM options may follow.
set -euo pipefail
exec vllm serve "${MODEL:-deepseek-ai/DeepSeek-V2-Lite}" \
    --tensor-parallel-size 2 \
    --compilation-config '{"cudagraph_mode": "PIECEWISE"}' \
    --additional-config '{"enable_kvpp": true}' \
    "$@"
