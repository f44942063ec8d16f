"""Attention of a whole prompt by libraries that are there anyway: what each does exactly, and which one to take."""
