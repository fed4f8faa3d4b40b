"""Models that several processes share, one per device: each layer by heads and K groups, or layers one by one."""
