"""What fits into memory and what pays, decided before a weight is read."""
