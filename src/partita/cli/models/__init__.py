"""Where a command's model comes from: a file of the user, or a configuration of Hugging Face."""
