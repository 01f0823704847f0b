"""The files of a checkpoint: tensors, plain values, and the manifest with checksums of all of them."""
