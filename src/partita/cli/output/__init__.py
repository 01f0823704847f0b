"""What commands write: files, progress, tables."""
