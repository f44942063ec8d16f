"""How far a cache format moves a model: metrics on the decode path, with intervals and a noise floor."""
