#!/usr/bin/env bash
# KVPP with MTP and a fixed K: draft layers are whole on every rank.
# MODEL: a folder or a name; further vLLM options may follow.
set -euo pipefail
exec vllm serve "${MODEL:-deepseek-ai/DeepSeek-V3}" \
    --tensor-parallel-size 8 \
    --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}' \
    --compilation-config '{"cudagraph_mode": "PIECEWISE"}' \
    --additional-config '{"enable_kvpp": true}' \
    "$@"
