"""How the newest queries share out their attention among the stored tokens."""
