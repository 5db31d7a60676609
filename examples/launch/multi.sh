#!/usr/bin/env bash
# Prefill with KVPP that serves decode.sh and fills a MemCache pool. For a Mooncake pool: the child's
# settings of pool_layerwise.sh. MMC_LOCAL_CONFIG_PATH as in pool_memcache.sh.
# MODEL: a folder or a name; further vLLM options may follow.
set -euo pipefail
exec vllm serve "${MODEL:-deepseek-ai/DeepSeek-V2-Lite}" \
    --port 8100 \
    --tensor-parallel-size 2 \
    --compilation-config '{"cudagraph_mode": "PIECEWISE"}' \
    --additional-config '{"enable_kvpp": true}' \
    --kv-transfer-config '{
    "kv_connector": "MultiConnector", "kv_role": "kv_producer", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"connectors": [
      {"kv_connector": "MooncakeConnectorV2", "kv_role": "kv_producer", "kv_port": 37000},
      {"kv_connector": "AscendStoreConnector", "kv_role": "kv_producer",
       "kv_connector_extra_config": {"backend": "memcache", "use_layerwise": false}}]}}' \
    "$@"
