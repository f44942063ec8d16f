"""Rules: one file each, with what it matches, what it checks and what it says when a check fails."""
