"""Scaling laws of draft heads: train a grid, fit accepted tokens over text and depth, predict what to train."""
