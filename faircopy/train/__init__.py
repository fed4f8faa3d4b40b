"""Training: one loop, flat token data, and the small language models that come with the project."""
