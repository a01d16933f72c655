"""What this project relies on in vLLM, looked up in vLLM's source without importing it.

`scripts/check-seams FOLDER` compares another vLLM, unpacked, with the installed one.
"""
