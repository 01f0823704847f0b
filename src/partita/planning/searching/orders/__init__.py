"""Orders of passes: timed, held against memory, made and improved."""
