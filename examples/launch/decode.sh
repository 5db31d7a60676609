#!/usr/bin/env bash
# Decode, without KVPP, of what prefill.sh makes. kv_port and up must not overlap prefill's.
# MODEL: a folder or a name; further vLLM options may follow.
set -euo pipefail
exec vllm serve "${MODEL:-deepseek-ai/DeepSeek-V2-Lite}" \
    --port 8200 \
    --kv-transfer-config '{"kv_connector": "MooncakeConnectorV2", "kv_role": "kv_consumer", "kv_port": 37010,
    "kv_load_failure_policy": "recompute"}' \
    "$@"
