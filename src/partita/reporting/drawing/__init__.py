"""What all pages are drawn with: scales, axes, colours, units."""
