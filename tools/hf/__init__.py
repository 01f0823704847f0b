"""Hugging Face architectures, cut and compared: what ``tools/hf_table.py`` runs."""
