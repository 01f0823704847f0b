"""A data parallel backward pass: its buckets as a table and a chart."""
