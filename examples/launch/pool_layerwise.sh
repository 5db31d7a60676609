#!/usr/bin/env bash
# KVPP with a Mooncake pool, layer by layer: a layer is broadcast once its owner has loaded it.
# mooncake_master runs already at MASTER.
# MODEL: a folder or a name; further vLLM options may follow.
set -euo pipefail
MASTER=${MASTER:-127.0.0.1:50051}
exec vllm serve "${MODEL:-deepseek-ai/DeepSeek-V2-Lite}" \
    --tensor-parallel-size 2 \
    --enforce-eager \
    --additional-config '{"enable_kvpp": true}' \
    --kv-transfer-config '{
    "kv_connector": "AscendStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"backend": "mooncake", "use_layerwise": true, "load_async": false,
      "mooncake": {"master_server_address": "'"$MASTER"'"}}}' \
    "$@"
