"""The paper's Tables 1 to 5 from finished runs, beside the figures that it printed."""
