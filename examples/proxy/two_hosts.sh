#!/usr/bin/env bash
# Prefill with KVPP on one host, decode on another, the proxy on either; CUDA or Ascend:
#
#   prefill host:  examples/proxy/two_hosts.sh prefill MODEL
#   decode host:   examples/proxy/two_hosts.sh decode MODEL
#   proxy:         examples/proxy/two_hosts.sh proxy PREFILL_HOST DECODE_HOST
#
# More engines of a kind: start more, and give `kvpp proxy` their URLs as well. The engines listen
# on HOST (default: all addresses), so keep them in a network of their own; the proxy listens on
# PROXY_HOST (default: 127.0.0.1). TP (8) is the number of devices of an engine, DEVICES which ones,
# e.g. 0,1,2,3. Both engines fit on one host, too: prefill's workers take the ports 37000 and up, one
# each, and decode's 37010 and up, which is room for ten.
set -euo pipefail

usage() { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
ROLE=$1; shift
HOST=${HOST:-0.0.0.0}
TP=${TP:-8}
[ -z "${DEVICES:-}" ] || export CUDA_VISIBLE_DEVICES=$DEVICES ASCEND_RT_VISIBLE_DEVICES=$DEVICES

case $ROLE in
prefill)
    MODEL=$1; shift
    # Under KVPP graphs are PIECEWISE or off.
    exec vllm serve "$MODEL" --host "$HOST" --port 8100 --tensor-parallel-size "$TP" \
        --compilation-config '{"cudagraph_mode": "PIECEWISE"}' \
        --additional-config '{"enable_kvpp": true}' \
        --kv-transfer-config \
        '{"kv_connector": "MooncakeConnectorV2", "kv_role": "kv_producer", "kv_port": 37000}' "$@"
    ;;
decode)
    MODEL=$1; shift
    exec vllm serve "$MODEL" --host "$HOST" --port 8200 --tensor-parallel-size "$TP" \
        --kv-transfer-config \
        '{"kv_connector": "MooncakeConnectorV2", "kv_role": "kv_consumer", "kv_port": 37010,
  "kv_load_failure_policy": "recompute"}' "$@"
    ;;
proxy)
    PREFILL=$1; DECODE=$2; shift 2
    exec kvpp proxy --host "${PROXY_HOST:-127.0.0.1}" --port 8000 \
        --prefill "http://$PREFILL:8100" --decode "http://$DECODE:8200" "$@"
    ;;
*) usage ;;
esac
