# `make demo` and `make test` are all a newcomer needs; both install into .venv first, once.
DEVICE ?= cpu
export DEVICE

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-text serve test test-unit test-parity test-speech test-engine test-http \
	check bench bench-serve bench-kernels bench-speech bench-talk eval eval-voice soak torture voice \
	clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup:  ## Create .venv and install (DEVICE=cpu or cuda)
	@scripts/setup $(DEVICE)

demo: setup  ## Hear a paragraph spoken in one stream that does not grow
	@OMP_NUM_THREADS=1 .venv/bin/python -m bounded_kv_speech.demo $(ARGS)

demo-text: setup  ## Watch one chat answer outgrow its cache
	@.venv/bin/python -m vllm_bounded_kv.demo $(ARGS)

serve: setup  ## Serve with a bounded cache (MODEL, or MODEL=voice; HOST, PORT, ARGS)
	@scripts/serve

test: setup  ## Run all tests
	@scripts/test

test-unit: setup  ## Minutes: pure arithmetic, configuration, vLLM's scheduler without a worker
	@scripts/test unit

test-parity: setup  ## Attention against a float64 list of everything
	@scripts/test parity

test-speech: setup  ## The embedded voice through vLLM, and its server
	@scripts/test speech

test-engine: setup  ## Real engines in process, against a float64 model
	@scripts/test engine

test-http: setup  ## Real servers over HTTP
	@scripts/test http

check: setup  ## Lint, format, types, import contracts
	@scripts/check

bench: setup  ## Against stock vLLM, as ratios; ends in one JSON line
	@.venv/bin/python -m benchmarks ratios $(ARGS)

bench-serve: setup  ## Servers side by side: stock vLLM, a sliding window, transformers (ARGS)
	@.venv/bin/python -m benchmarks serve $(ARGS)

bench-kernels: setup  ## The slot pool's attention against dense SDPA, and planning (ARGS)
	@.venv/bin/python -m benchmarks kernels $(ARGS)

bench-speech: setup  ## The speech server as its listeners hear it, alone and under load (ARGS)
	@OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks speech $(ARGS)

bench-talk: setup  ## A text model's story, spoken over the socket while it is told (ARGS)
	@OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks talk $(ARGS)

eval: setup  ## Perplexity of long real text, by how the stream is kept (ARGS)
	@.venv/bin/python -m benchmarks quality $(ARGS)

eval-voice: setup  ## How well the embedded voice speaks: words, voices, five minutes, speed (ARGS)
	@OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks voice $(ARGS)

voice: setup  ## Train the embedded voice anew: hours; goes on where it was (WORK=folder)
	@scripts/voice

soak: setup  ## One stream of a million tokens beside short ones (hours); blocks, memory, latency
	@.venv/bin/python -m benchmarks soak $(ARGS)

torture: setup  ## Servers under fire: crowds, a thousand who leave, bad bytes, a killed engine (ARGS)
	@scripts/torture $(ARGS)

clean:  ## Remove .venv and caches (not the default model in the user's cache)
	rm -rf .venv build .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
