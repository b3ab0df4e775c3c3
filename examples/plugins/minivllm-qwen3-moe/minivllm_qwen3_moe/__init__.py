"""Qwen3-MoE for minivllm: ``plugin.py`` says what there is, ``model.py`` is the model, ``experts`` does the work."""
