#!/usr/bin/env bash
# Talk to a running server with curl. Start it first: make serve
set -euo pipefail
url=${1:-http://127.0.0.1:8000}

echo "== an answer, streamed, with a window of its own"
curl -sN "$url/v1/chat/completions" -H 'content-type: application/json' -d '{
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Name three rivers."}],
    "max_tokens": 40, "stream": true,
    "vllm_xargs": {"kv_window": 64}
}' | sed -n 's/.*"content":"\([^"]*\)".*/\1/p' | tr -d '\n'
echo

echo "== what the server holds"
curl -s "$url/v1/bounded_kv"
echo

echo "== the same as metrics"
curl -s "$url/metrics" | grep '^bounded_kv'

echo "== a request beyond the server's limits: HTTP 400"
curl -s "$url/v1/completions" -H 'content-type: application/json' -d '{
    "model": "smollm2", "prompt": "Hello", "vllm_xargs": {"kv_window": 1000000}
}'
echo
