"""The published alternatives to pages: batches held as rectangles, and who runs together in them."""
