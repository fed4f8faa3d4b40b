"""What the command line shows and reads."""
