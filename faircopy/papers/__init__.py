"""The published alternatives to pages: batches held as rectangles, and which sequences run together in them."""
