"""What a part of a model costs when it runs as a stage runs: seconds of F, B, I and W, and bytes."""
