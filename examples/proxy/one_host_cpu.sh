#!/usr/bin/env bash
# Prefill (two ranks with KVPP), decode (one rank) and the proxy on one machine without a GPU:
#
#   examples/proxy/one_host_cpu.sh MODEL [vLLM options for both engines]
#   curl localhost:8000/v1/completions -H 'Content-Type: application/json' \
#       -d '{"model": "m", "prompt": [2, 3, 4, 5], "max_tokens": 8}'
#
# MODEL is a folder or a name on Hugging Face; it is served as "m". `Ctrl-C` or SIGTERM ends all.
# PYTHON, PORT, PREFILL_PORT and DECODE_PORT can be set; logs are in LOGS (default: a new folder).
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
MODEL=$1; shift
PYTHON=${PYTHON:-python}
PORT=${PORT:-8000}
PREFILL_PORT=${PREFILL_PORT:-8100}
DECODE_PORT=${DECODE_PORT:-8200}
LOGS=${LOGS:-$(mktemp -d -t kvpp-proxy-XXXXXX)}
START_S=${START_S:-600} # for the engines to load

# Three ranks on a small machine: one thread each, not pinned; see docs/cpu.md.
export OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_CI_ENV=1
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GiB for every rank

pids=()
stop() {
    trap - EXIT INT TERM
    [ ${#pids[@]} -gt 0 ] || return 0
    kill -TERM "${pids[@]}" 2>/dev/null || return 0
    for _ in {1..60}; do
        kill -0 "${pids[@]}" 2>/dev/null || return 0
        sleep 0.5
    done
    kill -KILL "${pids[@]}" 2>/dev/null || true
}
trap stop EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

engine() { # name, port, options
    local name=$1 port=$2; shift 2
    # vllm-cpu's `vllm serve` does not start; the server behind it does.
    "$PYTHON" -m vllm.entrypoints.openai.api_server --model "$MODEL" --served-model-name m \
        --host 127.0.0.1 --port "$port" --enforce-eager --attention-backend CPU_MLA "$@" \
        >"$LOGS/$name.log" 2>&1 &
    pids+=($!)
    echo "$name: process $!, log $LOGS/$name.log"
}

healthy() { # port
    "$PYTHON" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' \
        "http://127.0.0.1:$1/health" 2>/dev/null
}

await() { # name, port, process: until it is healthy, it has died, or the time is over
    until healthy "$2"; do
        kill -0 "$3" 2>/dev/null ||
            { echo "$1 has ended:"; tail -20 "$LOGS/$1.log"; exit 1; }
        [ $SECONDS -lt "$START_S" ] || { echo "$1 is not up after $START_S s"; exit 1; }
        sleep 1
    done >&2
}

engine prefill "$PREFILL_PORT" --tensor-parallel-size 2 \
    --additional-config '{"enable_kvpp": true}' \
    --kv-transfer-config \
    '{"kv_connector": "MooncakeConnectorV2", "kv_role": "kv_producer", "kv_port": 37000}' "$@"
engine decode "$DECODE_PORT" \
    --additional-config '{"kvpp": {"cpu_profile": true}}' \
    --kv-transfer-config \
    '{"kv_connector": "MooncakeConnectorV2", "kv_role": "kv_consumer", "kv_port": 37010,
  "kv_load_failure_policy": "recompute"}' "$@"
await prefill "$PREFILL_PORT" "${pids[0]}"
await decode "$DECODE_PORT" "${pids[1]}"

"$PYTHON" -c 'from kvpp_connectors.cli.main import main; main()' proxy --port "$PORT" \
    --prefill "http://127.0.0.1:$PREFILL_PORT" --decode "http://127.0.0.1:$DECODE_PORT" &
pids+=($!)
wait -n "${pids[@]}" || true
echo "one of the three has ended; logs: $LOGS" >&2
exit 1
