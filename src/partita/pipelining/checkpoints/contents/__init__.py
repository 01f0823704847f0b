"""What a checkpoint holds of models and optimizers: who writes which value, and how it is put back."""
