#!/usr/bin/env bash
# KVPP with a MemCache pool, whole blocks, loaded between steps. MMC_LOCAL_CONFIG_PATH names MemCache's
# configuration; its MetaService runs already. kv_role kv_both does the same here.
# MODEL: a folder or a name; further vLLM options may follow.
set -euo pipefail
exec vllm serve "${MODEL:-deepseek-ai/DeepSeek-V2-Lite}" \
    --tensor-parallel-size 2 \
    --compilation-config '{"cudagraph_mode": "PIECEWISE"}' \
    --additional-config '{"enable_kvpp": true}' \
    --kv-transfer-config '{
    "kv_connector": "AscendStoreConnector", "kv_role": "kv_producer", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"backend": "memcache", "use_layerwise": false, "load_async": true}}' \
    "$@"
