"""What a pass repeats of the stages before its own: their recorded answers, in the code of the model."""
