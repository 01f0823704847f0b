"""What the splitter made: pieces as a table, a drawing, a page."""
