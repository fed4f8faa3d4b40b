"""Models that several processes share, one per device: tensor parallel by heads and groups of K, pipelines by layers."""
