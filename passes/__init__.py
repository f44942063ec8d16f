"""The stages of one compile: they read and rewrite FX graphs and know no kernel and no runtime object."""
