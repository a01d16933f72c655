"""Settings that every test shares. Nothing here may reach a network."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Engine tests look inside the engine; tests of whole servers start processes of their own.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
