"""Checkpoints and safetensors folders, as ``from_pretrained`` reads them: from one to the other."""
