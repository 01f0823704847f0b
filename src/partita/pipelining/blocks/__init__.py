"""Stages that run the model's own code: what lies before a stage is repeated from recorded answers."""
