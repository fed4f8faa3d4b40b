"""Checks the promise on your own models, prompts and servers, and reports every difference."""
