#!/usr/bin/env bash
# The speech server by curl: `bounded-kv-server` first. Settable: URL.
set -euo pipefail
url=${URL:-http://127.0.0.1:8000}/v1/audio
post=(curl -sS --fail-with-body -H 'Content-Type: application/json')

curl -sS "$url/voices"
echo
"${post[@]}" "$url/speech" -o speech.mp3 -d '{"input": "Good morning. It is nice to see you."}'
"${post[@]}" "$url/speech" -o speech.wav \
    -d '{"input": "The same, slower, by another voice.", "voice": "otto", "speed": 0.8, "response_format": "wav"}'
# A voice from a sample: here, of what has just been said.
curl -sS --fail-with-body "$url/voices" -F name=second -F consent=true -F audio_sample=@speech.wav
echo
"${post[@]}" "$url/speech" -o second.mp3 -d '{"input": "This is my voice now.", "voice": "second"}'
curl -sS -X DELETE "$url/voices/second"
echo
ls -l speech.mp3 speech.wav second.mp3
# While it is made: ... | ffplay -autoexit -nodisp -loglevel error -
