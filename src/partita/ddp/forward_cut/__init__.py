"""``DDPOptimizer``: forward graphs that are cut for torch's own ``DistributedDataParallel``."""
