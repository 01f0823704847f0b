"""What all of a pipeline shares: who needs which value from whom, as data."""
