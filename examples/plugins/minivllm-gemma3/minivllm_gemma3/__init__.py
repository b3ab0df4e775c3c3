"""Gemma 3 for minivllm: ``plugin.py`` says what there is, ``model.py`` is the model."""
