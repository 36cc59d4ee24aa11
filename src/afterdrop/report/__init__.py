"""What runs show: tables, figures, the HTML page. Reads runs only."""
