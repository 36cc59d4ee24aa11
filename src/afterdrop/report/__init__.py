"""What runs show: the paper's tables beside the published figures. Reads runs only."""
