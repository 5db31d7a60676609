#!/usr/bin/env bash
# Everything that needs an NPU: KVPP off and on, prefill and decode, pools; then a report.
#
#   examples/ascend/verify.sh MODEL [vLLM options for every engine]
#
# TP (2) ranks an engine. P/D needs twice as many NPUs: PREFILL_DEVICES=0,1 DECODE_DEVICES=2,3. The
# pool over MemCache needs MMC_LOCAL_CONFIG_PATH and a running MetaService; that over Mooncake brings
# its own mooncake_master. Answers are greedy: with KVPP they must be those without it.
# Rehearsed on a CPU, where PLAIN_CONFIG is '{"kvpp": {"cpu_profile": true}}' and PROTOCOL is tcp.
# SERVE ("vllm serve") is the command before the model; OUT the folder for logs and report.txt.
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
MODEL=$1; shift
COMMON=("$@")
HERE=$(cd "$(dirname "$0")" && pwd)
TP=${TP:-2}
SERVE=${SERVE:-vllm serve}
PYTHON=${PYTHON:-python3}
PROTOCOL=${PROTOCOL:-ascend}
START_S=${START_S:-1800} # for an engine to load
OUT=${OUT:-$(mktemp -d -t kvpp-verify-XXXXXX)}
REPORT=$OUT/report.txt
KVPP=(--tensor-parallel-size "$TP" --additional-config '{"enable_kvpp": true}')
PLAIN=(--tensor-parallel-size "$TP" --additional-config "${PLAIN_CONFIG:-{\}}") # without KVPP
FAILED=0
export PYTHONHASHSEED=${PYTHONHASHSEED:-0} # pool keys must agree between engines
mkdir -p "$OUT"
: >"$REPORT"

say() { printf '%s\n' "$*" | tee -a "$REPORT"; }
pids=()
stop() { # ends every process that was started, and what they started
    for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
    for pid in "${pids[@]}"; do
        for _ in {1..120}; do kill -0 "$pid" 2>/dev/null || break; sleep 0.5; done
        kill -KILL -- "-$pid" 2>/dev/null || true
    done
    pids=()
}
trap stop EXIT
trap 'exit 130' INT TERM

start() { # NAME COMMAND...: in the background, its output in NAME.log
    local name=$1; shift
    setsid "$@" >"$OUT/$name.log" 2>&1 &
    pids+=($!)
}
wait_for() { # URL NAME: the server answers, or its process has ended
    local ends=$((SECONDS + START_S))
    until curl -sf -o /dev/null "$1"; do
        kill -0 "${pids[-1]}" 2>/dev/null && [ $SECONDS -lt $ends ] || return 1
        sleep 1
    done
}
engine() { # NAME PORT OPTIONS...
    local name=$1 port=$2; shift 2
    # shellcheck disable=SC2086  SERVE is a command and its options
    start "$name" $SERVE "$MODEL" --host 127.0.0.1 --port "$port" "$@" "${COMMON[@]}"
    wait_for "http://127.0.0.1:$port/health" "$name"
}
ask() { "$PYTHON" "$HERE/ask.py" "http://127.0.0.1:$1" "$OUT/$2.json" 2>>"$OUT/ask.log"; }
compare() { # WHAT NAME: the answers of NAME against those without KVPP
    local found
    if found=$("$PYTHON" "$HERE/ask.py" --compare "$OUT/$2.json" "$OUT/off.json" 2>&1); then
        say "PASS  $1: $found"
    else
        FAILED=1
        say "FAIL  $1: ${found##*$'\n'}"
    fi
}
failed() { # WHAT LOG: it did not run; shows the end of the log
    FAILED=1
    say "FAIL  $1 (the end of $OUT/$2.log follows)"
    tail -n 15 "$OUT/$2.log" 2>/dev/null | tee -a "$REPORT" || true
}

say "model $MODEL, TP $TP, options ${COMMON[*]:-none}"
{ npu-smi info 2>&1 || echo "no npu-smi"; } | head -n 40 >>"$REPORT"
COLUMNS=160 kvpp doctor >"$OUT/doctor.log" 2>/dev/null && say "PASS  kvpp doctor" || failed "kvpp doctor" doctor
cat "$OUT/doctor.log" >>"$REPORT"

if engine off 8100 "${PLAIN[@]}" && ask 8100 off; then
    say "      without KVPP: $(grep -ohE 'KV cache size: [0-9,]+ tokens' "$OUT/off.log" | head -n 1)"
else
    failed "an engine without KVPP" off
    exit 1 # nothing to compare with
fi
stop

if engine on 8100 "${KVPP[@]}" && ask 8100 on && ask 8100 on_cached; then
    compare "KVPP, new prompts" on
    compare "KVPP, cached prompts" on_cached
    say "      with KVPP: $(grep -ohE 'KV cache size: [0-9,]+ tokens' "$OUT/on.log" | head -n 1)"
else
    failed "an engine with KVPP" on
fi
stop

if [ -n "${PREFILL_DEVICES:-}" ] && [ -n "${DECODE_DEVICES:-}" ]; then
    side() { printf '{"kv_connector": "MooncakeConnectorV2", "kv_role": "kv_%s", "kv_port": %s}' "$1" "$2"; }
    if ASCEND_RT_VISIBLE_DEVICES=$PREFILL_DEVICES engine prefill 8100 "${KVPP[@]}" \
            --kv-transfer-config "$(side producer 37000)" &&
        ASCEND_RT_VISIBLE_DEVICES=$DECODE_DEVICES engine decode 8200 "${PLAIN[@]}" \
            --kv-transfer-config "$(side consumer 37010)" &&
        start proxy kvpp proxy --port 8000 \
            --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 &&
        wait_for http://127.0.0.1:8000/health proxy && ask 8000 pd; then
        compare "prefill with KVPP, decode without" pd
        say "      $(grep -ohE 'pulled [0-9,]+ bytes.* in [0-9.]+ s' "$OUT/decode.log" | tail -n 1)"
    else
        failed "prefill, decode and proxy" decode
        tail -n 15 "$OUT/prefill.log" >>"$REPORT" || true
    fi
    stop
else
    say "SKIP  prefill and decode: set PREFILL_DEVICES and DECODE_DEVICES"
fi

pool() { # NAME EXTRA [SERVICE...]: what one engine saves another one loads
    local name=$1 extra=$2 config
    shift 2
    [ $# = 0 ] || start "$name-service" "$@"
    config='{"kv_connector": "AscendStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": '"$extra"'}'
    if engine "$name-saves" 8100 "${KVPP[@]}" --kv-transfer-config "$config" && ask 8100 "$name-saves"; then
        curl -s "http://127.0.0.1:8100/metrics" | grep -E '^vllm:kvpp_pool' >"$OUT/$name-saves.metrics" || true
    else
        failed "$name, first engine" "$name-saves"; stop; return
    fi
    sleep "${SAVE_S:-10}" # its saves end behind the answers
    # The second one stands beside it where memory of the first is the pool: on other devices.
    if ASCEND_RT_VISIBLE_DEVICES=${DECODE_DEVICES:-${ASCEND_RT_VISIBLE_DEVICES:-}} \
        engine "$name-loads" 8200 "${KVPP[@]}" --kv-transfer-config "$config" && ask 8200 "$name-loads"; then
        compare "$name, loaded by another engine" "$name-loads"
        curl -s "http://127.0.0.1:8200/metrics" | grep -E '^vllm:kvpp_pool' | tee "$OUT/$name-loads.metrics" >>"$REPORT" || true
    else
        failed "$name, second engine" "$name-loads"
    fi
    stop
}
if [ -z "${DECODE_DEVICES:-}" ]; then
    say "SKIP  pools: the engine that loads needs DECODE_DEVICES"
else
    [ -z "${PREFILL_DEVICES:-}" ] || export ASCEND_RT_VISIBLE_DEVICES=$PREFILL_DEVICES
    MASTER=127.0.0.1:50088
    MOONCAKE='"mooncake": {"master_server_address": "'$MASTER'", "protocol": "'$PROTOCOL'", "global_segment_size": "1GB"}'
    pool mooncake-layers '{"backend": "mooncake", "use_layerwise": true, "load_async": false, '"$MOONCAKE"'}' \
        mooncake_master --rpc_address=127.0.0.1 --rpc_port=50088 --default_kv_lease_ttl=11000
    if [ -n "${MMC_LOCAL_CONFIG_PATH:-}" ]; then
        pool memcache '{"backend": "memcache", "use_layerwise": false, "load_async": true, "lookup_rpc_port": "0"}'
    else
        say "SKIP  the pool over MemCache: set MMC_LOCAL_CONFIG_PATH"
    fi
fi

say "report: $REPORT"
exit $FAILED
