"""The networks of draft heads, one file per paper, and the decoder layers they are made of."""
