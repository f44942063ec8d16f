"""Products of few rows with several weights."""
