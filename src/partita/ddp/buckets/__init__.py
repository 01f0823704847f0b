"""Which gradients share a bucket, and how a bucket is averaged over all ranks."""
