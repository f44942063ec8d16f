"""The page layout, the operators over it and their implementations: they know no graph and no cache object."""
