"""What runs show: tables, figures, pages. Reads runs only."""
