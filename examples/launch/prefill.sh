#!/usr/bin/env bash
# Prefill with KVPP. decode.sh takes what it makes; `kvpp proxy` stands before both.
# MODEL: a folder or a name; further vLLM options may follow.
set -euo pipefail
exec vllm serve "${MODEL:-deepseek-ai/DeepSeek-V2-Lite}" \
    --port 8100 \
    --tensor-parallel-size 2 \
    --compilation-config '{"cudagraph_mode": "PIECEWISE"}' \
    --additional-config '{"enable_kvpp": true}' \
    --kv-transfer-config '{"kv_connector": "MooncakeConnectorV2", "kv_role": "kv_producer", "kv_port": 37000}' \
    "$@"
